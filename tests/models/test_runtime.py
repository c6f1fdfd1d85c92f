"""How a network runs: checkpointing, attention back ends, offload, and what the adapters refuse or
say aloud."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from modelkit import gradients, noise, perturb
from runtimekit import ADAPTERS, PROMPTS, load, make_folders, network, velocity
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.models.attention import HUB, LOCAL, NAMES
from flowrl.models.flux import FluxOptions
from flowrl.models.options import checked
from flowrl.models.runtime import Runtime
from flowrl.models.sd3 import SD3Options

FNS = list(ADAPTERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("models"))


# -------------------------------------------------------------------------------------- the options


def test_defaults_change_nothing() -> None:
    assert SD3Options("x").how == SD3Options("x", runtime=Runtime()).how == Runtime()


def test_a_config_sets_them() -> None:
    model = "model={fn: flux, path: x, runtime: {checkpointing: true, cache: texts}}"
    kwargs = load_config("shapes/flow_grpo", [model]).model.kwargs
    found = checked(FluxOptions, **kwargs)
    assert found.runtime == Runtime(checkpointing=True, cache="texts")


# ------------------------------------------------------------------------------------ checkpointing

BLOCKS = {
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "sd15": {"BasicTransformerBlock"},
    "sdxl": {"BasicTransformerBlock"},
}


@contextmanager
def counted(model: Any, kinds: set[str]) -> Iterator[dict[str, int]]:
    """Count how often each block of the network starts to compute."""
    blocks = {name: m for name, m in network(model).named_modules() if type(m).__name__ in kinds}
    calls = dict.fromkeys(blocks, 0)

    def count(name: str) -> Any:
        return lambda *_: calls.update({name: calls[name] + 1})

    hooks = [block.register_forward_pre_hook(count(name)) for name, block in blocks.items()]
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("fn", FNS)
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_checkpointing_computes_blocks_again_and_changes_no_gradient(
    folders: dict[str, Path], fn: str, tune: str
) -> None:
    plain, thrifty = (
        load(folders, fn, tune=tune),
        load(folders, fn, tune=tune, runtime={"checkpointing": True}),
    )
    found, calls = [], []
    for model in (plain, thrifty):
        perturb(model, 0.05)
        assert not any(
            module.training for module in network(model).modules()
        )  # eval mode does not turn it off
        with counted(model, BLOCKS[fn]) as seen:
            found.append(gradients(model, velocity(model).square().sum()))
        calls.append(set(seen.values()))
    assert calls == [{1}, {2}]
    assert set(found[0]) == set(found[1]) == set(plain.trainable())
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


@pytest.mark.parametrize("fn", FNS)
def test_checkpointing_leaves_sampling_alone(folders: dict[str, Path], fn: str) -> None:
    plain, thrifty = load(folders, fn), load(folders, fn, runtime={"checkpointing": True})
    with torch.no_grad(), counted(thrifty, BLOCKS[fn]) as calls:
        v = velocity(thrifty)
    assert set(calls.values()) == {1} and not v.requires_grad
    assert torch.equal(v, velocity(plain))


# ---------------------------------------------------------------------------------------- attention


class Kernels(TorchDispatchMode):
    """Note which kernels torch runs for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func) or "softmax" in str(func):
            self.seen.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def kernels(model: Any) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """Return velocity, gradients, and the kernels of both passes."""
    model.encode(PROMPTS)  # the text encoders attend, too
    with Kernels() as noted:
        v = velocity(model)
        found = gradients(model, v.square().sum())
    return v.detach(), found, noted.seen


@pytest.mark.parametrize("fn", FNS)
def test_a_back_end_reaches_every_attention(folders: dict[str, Path], fn: str) -> None:
    """torch's own names of the kernels say which one ran; FLUX is the only one that
    set_attention_backend reaches."""
    plain, other = load(folders, fn), load(folders, fn, runtime={"attention": "_native_math"})
    later = load(folders, fn)  # one model's back end is not the next one's
    thrifty = load(folders, fn, runtime={"attention": "_native_math", "checkpointing": True})
    for model in (plain, other, later, thrifty):
        perturb(model, 0.05)
    v, grads, seen = kernels(plain)
    assert {FLASH, f"{FLASH}_backward"} <= seen and not any("softmax" in name for name in seen)
    for model in (
        other,
        thrifty,
    ):  # checkpointing computes anew outside of the call, by the same back end
        v_math, grads_math, seen_math = kernels(model)
        assert any("softmax" in name for name in seen_math) and not any(
            "flash" in name for name in seen_math
        )
        # the UNets' velocities reach 10, as noise prediction is divided by the signal that is left
        torch.testing.assert_close(v_math, v, rtol=0, atol=1e-5 * max(1.0, float(v.abs().max())))
        for name, grad in grads.items():
            torch.testing.assert_close(
                grads_math[name], grad, rtol=0, atol=5e-3 * float(grad.abs().max())
            )
    assert kernels(later)[2] == seen


@pytest.mark.parametrize("name", ["_native_cudnn", "xformers", "flash", "sage"])
def test_a_back_end_that_does_not_work_here_names_those_that_do(
    folders: dict[str, Path], name: str
) -> None:
    package = {"flash": "flash_attn", "sage": "sageattention"}.get(name, name)
    if torch.cuda.is_available() or (package != name and importlib.util.find_spec(package)):
        pytest.skip("it may work on this machine")
    able = "Available: native, _native_flash, _native_math"
    with pytest.raises(
        ModelError,
        match=rf"'{name}' does not work here in float32 on cpu with a gradient: .*{able}",
    ):
        load(folders, "sd15", runtime={"attention": name})


def test_names_are_diffusers_own() -> None:
    assert {"native", "flash", "xformers", "sage", "flex", "_flash_3", "_native_math"} <= set(LOCAL)
    assert {*NAMES} - {*LOCAL} == {name for name in NAMES if name.endswith(HUB)} != set()


# ------------------------------------------------------------------------------------------ offload

SIDE = {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"}


def watch_moves(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[str, str]]:
    """Note (part, device) of each move of a side part, and what works in between."""
    log: list[tuple[str, str]] = []
    pipeline = model.pipeline()
    named = {
        id(part): name
        for name, part in pipeline.components.items()
        if name in SIDE and part is not None
    }
    move, encode, decode = nn.Module.to, pipeline.encode_prompt, pipeline.vae.decode

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if id(self) in named:
            log.append((named[id(self)], str(args[0])))
        return move(self, *args, **options)

    def work(name: str, function: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            log.append(("work", name))
            return function(*args, **options)

        return watched

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(pipeline, "encode_prompt", work("encode", encode))
    monkeypatch.setattr(pipeline.vae, "decode", work("decode", decode))
    return log


@pytest.mark.parametrize("fn", FNS)
def test_side_parts_are_on_the_device_only_while_they_work(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fn: str
) -> None:
    """cpu:0 is the device and cpu is where parts wait: one place, but two names, so that moves can
    be told apart."""
    plain, model = load(folders, fn), load(folders, fn, device="cpu:0", runtime={"offload": True})
    x = noise(plain, 2, 32, 32)
    expected, images = plain.encode(PROMPTS), plain.decode(x)
    log = watch_moves(monkeypatch, model)
    encoders = sorted(name for name in SIDE - {"vae"} if name in model.pipeline().components)
    cond = model.encode(PROMPTS)
    there, back = [(name, "cpu:0") for name in encoders], [(name, "cpu") for name in encoders]
    assert log == [
        *there,
        ("work", "encode"),
        ("work", "encode"),
        *back,
    ]  # once for all new prompts
    log.clear()
    model.encode(PROMPTS[::-1])
    assert log == []
    # not to the bit: a move from cpu to cpu:0 copies the weights to another place, and sums depend
    # on where they start
    torch.testing.assert_close(model.decode(x), images, rtol=0, atol=1e-6)
    assert log == [("vae", "cpu:0"), ("work", "decode"), ("vae", "cpu")]
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)


def test_parts_go_back_after_an_error_too(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders, "sd15", device="cpu:0", runtime={"offload": True})
    monkeypatch.setattr(model.pipeline(), "encode_prompt", lambda *_: 1 / 0)
    log = watch_moves(monkeypatch, model)
    with pytest.raises(ZeroDivisionError):
        model.encode(PROMPTS)
    assert log == [("text_encoder", "cpu:0"), ("work", "encode"), ("text_encoder", "cpu")]


# ------------------------------------------------------------------------------------- long prompts

LONG = (
    "a red square and a blue circle " * 8
)  # the tiny tokenizers know letters: 192 tokens and more
PIPELINES = {
    "sd3": StableDiffusion3Pipeline,
    "flux": FluxPipeline,
    "sd15": StableDiffusionPipeline,
    "sdxl": StableDiffusionXLPipeline,
}


def diffusers_text(folders: dict[str, Path], fn: str, prompt: str) -> dict[str, Tensor]:
    """Encode a prompt by a pipeline that diffusers loaded itself."""
    whole = {"safety_checker": None} if fn == "sd15" else {}
    pipeline = PIPELINES[fn].from_pretrained(folders[fn], **whole)
    with torch.no_grad():
        if fn == "sd3":
            embeds, _, pooled, _ = pipeline.encode_prompt(
                prompt, None, None, max_sequence_length=24
            )
        elif fn == "flux":
            embeds, pooled, _ = pipeline.encode_prompt(prompt, max_sequence_length=24)
        elif fn == "sd15":
            return {"embeds": pipeline.encode_prompt(prompt, "cpu", 1, False)[0]}
        else:
            embeds, _, pooled, _ = pipeline.encode_prompt(prompt)
    return {"embeds": embeds, "pooled": pooled}


@pytest.mark.parametrize("fn", FNS)
def test_long_prompts_are_the_pipelines_and_are_named_once(
    folders: dict[str, Path], fn: str
) -> None:
    """CLIP reads 77 tokens, of which two mark start and end, T5 here 24 with one mark; a letter is
    a token."""
    model = load(folders, fn)
    with pytest.warns(
        UserWarning, match="the prompt 'a red square and .* is cut: CLIP reads 77"
    ) as caught:
        cond = model.encode([PROMPTS[0], LONG, "b" * 90])
        model.encode(["c" * 90])
    assert len(caught) == 1 and caught[0].filename == __file__
    letters = LONG.replace(" ", "")
    text = str(caught[0].message).replace(" ", "")
    assert text.count(f"CLIPreads77tokens,without'{letters[75:]}'") == 1
    assert (
        ("T5reads24tokens" in text)
        == ("largermax_sequence_length" in text)
        == (fn in ("sd3", "flux"))
    )
    expected = diffusers_text(folders, fn, LONG)
    for name, row in expected.items():
        assert torch.equal(cond[name][1:2], row), name


def test_what_is_read_whole_is_not_warned_of(
    folders: dict[str, Path], recwarn: pytest.WarningsRecorder
) -> None:
    load(folders, "sd15").encode(["a" * 75, *PROMPTS])
    assert [w for w in recwarn if "is cut" in str(w.message)] == []
