"""How a network runs: checkpointing, attention back ends, offload, and what is said aloud."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, PROMPTS, Folders, velocity
from diffusers import (
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from modelkit import gradients, noise, perturb
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.models.attention import HUB, LOCAL, NAMES, attend_in_groups
from flowrl.models.flux import FluxOptions
from flowrl.models.options import checked
from flowrl.models.runtime import Runtime
from flowrl.models.sd3 import SD3Options

# SD3's tiny pipeline here has T5 and, in its first block, SD3.5's second attention
NAME = {fn: "sd3.5" if fn == "sd3" else fn for fn in ADAPTERS}
BLOCKS = {
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "sd15": {"BasicTransformerBlock"},
    "sdxl": {"BasicTransformerBlock"},
}


@pytest.fixture(params=ADAPTERS)
def fn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(folders: Folders, fn: str, **options: Any) -> Any:
    """Load the tiny pipeline of an adapter, with LoRA of rank 2 unless told otherwise."""
    lora = {"lora": {"rank": 2}} if options.get("tune", "lora") == "lora" else {}
    return folders.load(NAME[fn], **lora, **options)


def test_a_config_sets_the_options_and_defaults_change_nothing() -> None:
    assert SD3Options("x").how == SD3Options("x", runtime=Runtime()).how == Runtime()
    model = "model={fn: flux, path: x, runtime: {checkpointing: true, cache: texts}}"
    kwargs = load_config("shapes/flow_grpo", [model]).model.kwargs
    found = checked(FluxOptions, **kwargs)
    assert found.runtime == Runtime(checkpointing=True, cache="texts")


# ---------------------------------------------------------------------------------- checkpointing


@contextmanager
def counted(model: Any, kinds: set[str]) -> Iterator[dict[str, int]]:
    """Count how often each block of the network starts to compute."""
    calls: dict[str, int] = {}
    hooks = []

    def count(name: str) -> Any:
        return lambda *_: calls.update({name: calls[name] + 1})

    for name, module in model.network.named_modules():
        if type(module).__name__ in kinds:
            calls[name] = 0
            hooks.append(module.register_forward_pre_hook(count(name)))
    yield calls
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_checkpointing_computes_blocks_again_and_changes_no_gradient(
    folders: Folders, fn: str, tune: str
) -> None:
    """In sampling it does nothing."""
    plain = load(folders, fn, tune=tune)
    thrifty = load(folders, fn, tune=tune, runtime={"checkpointing": True})
    found, sampled, calls = [], [], []
    for model in (plain, thrifty):
        perturb(model, 0.05)
        # eval mode does not turn it off
        assert not any(module.training for module in model.network.modules())
        with counted(model, BLOCKS[fn]) as seen:
            found.append(gradients(model, velocity(model).square().sum()))
        with counted(model, BLOCKS[fn]) as unseen, torch.no_grad():
            sampled.append(velocity(model))
        calls.append((set(seen.values()), set(unseen.values())))
    assert calls == [({1}, {1}), ({2}, {1})]
    assert torch.equal(*sampled) and not sampled[1].requires_grad
    assert set(found[0]) == set(found[1]) == set(plain.trainable())
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


# -------------------------------------------------------------------------------------- attention


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
    perturb(model, 0.05)
    model.encode(PROMPTS)  # the text encoders attend, too
    with Kernels() as noted:
        v = velocity(model)
        found = gradients(model, v.square().sum())
    return v.detach(), found, noted.seen


def test_a_back_end_reaches_every_attention(folders: Folders, fn: str) -> None:
    """By torch's names of the kernels; set_attention_backend reaches FLUX alone.

    Checkpointing computes anew outside of the call, by the same back end; one model's back end is
    not the next one's. The UNets' velocities reach 10, as noise is divided by the signal left.
    """
    v, grads, seen = kernels(load(folders, fn))
    assert {FLASH, f"{FLASH}_backward"} <= seen and not any("softmax" in name for name in seen)
    for checkpointing in (False, True):
        how = {"attention": "_native_math", "checkpointing": checkpointing}
        v_math, grads_math, seen_math = kernels(load(folders, fn, runtime=how))
        assert any("softmax" in name for name in seen_math)
        assert not any("flash" in name for name in seen_math)
        torch.testing.assert_close(v_math, v, rtol=0, atol=1e-5 * max(1.0, float(v.abs().max())))
        for name, grad in grads.items():
            atol = 5e-3 * float(grad.abs().max())
            torch.testing.assert_close(grads_math[name], grad, rtol=0, atol=atol)
    assert kernels(load(folders, fn))[2] == seen


def test_in_bfloat16_on_a_cpu_short_sequences_attend_in_groups(folders: Folders) -> None:
    """By torch's names of the kernels: none is fused in the network's passes, which are noted
    without the encoders'. The velocity is as far from float32's as with the fused kernel."""
    reference = load(folders, "sd3")
    perturb(reference, 0.05)
    exact, error = velocity(reference), {}
    for attention in ("auto", "native"):
        model = load(folders, "sd3", dtype="bfloat16", runtime={"attention": attention})
        perturb(model, 0.05)
        model.encode(PROMPTS)
        with Kernels() as noted:
            v = velocity(model)
            gradients(model, v.square().sum())
        assert (FLASH in noted.seen) == (attention == "native"), noted.seen
        error[attention] = float((v - exact).detach().norm() / exact.detach().norm())
    assert error["auto"] < 1.5 * error["native"] < 0.1, error


@pytest.mark.parametrize("sizes", [(1, 2, 5, 7), (40, 4, 142, 142), (3, 1, 64, 513)])
def test_attention_in_groups_is_torchs(sizes: tuple[int, int, int, int]) -> None:
    """In float64, forward and backward; 40 samples of 4 heads and 142 tokens make four groups."""
    batch, heads, n, m = sizes
    shapes = ((batch, heads, n, 8), (batch, heads, m, 8), (batch, heads, m, 8))
    qkv = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours, theirs = attend_in_groups(*qkv), torch.nn.functional.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(theirs)
    found = torch.autograd.grad((ours * weights).sum(), qkv)
    expected = torch.autograd.grad((theirs * weights).sum(), qkv)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["_native_cudnn", "xformers", "flash", "sage"])
def test_a_back_end_that_does_not_work_here_names_those_that_do(
    folders: Folders, name: str
) -> None:
    package = {"flash": "flash_attn", "sage": "sageattention"}.get(name, name)
    if torch.cuda.is_available() or (package != name and importlib.util.find_spec(package)):
        pytest.skip("it may work on this machine")
    able = "Available: native, _native_flash, _native_math"
    message = rf"'{name}' does not work here in float32 on cpu with a gradient: .*{able}"
    with pytest.raises(ModelError, match=message):
        load(folders, "sd15", runtime={"attention": name})


def test_names_are_diffusers_own() -> None:
    assert {"native", "flash", "xformers", "sage", "flex", "_flash_3", "_native_math"} <= set(LOCAL)
    assert {*NAMES} - {*LOCAL} == {name for name in NAMES if name.endswith(HUB)} != set()


# ---------------------------------------------------------------------------------------- offload

SIDE = {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"}


def watch_moves(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[str, str]]:
    """Note (part, device) of each move of a side part, and what works in between."""
    log: list[tuple[str, str]] = []
    pipeline = model.pipeline()
    named = {id(pipeline.components.get(name)): name for name in SIDE}
    move = nn.Module.to

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
    monkeypatch.setattr(pipeline, "encode_prompt", work("encode", pipeline.encode_prompt))
    monkeypatch.setattr(pipeline.vae, "decode", work("decode", pipeline.vae.decode))
    return log


def test_side_parts_are_on_the_device_only_while_they_work(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, fn: str
) -> None:
    """cpu:0 is the device and cpu where parts wait: one place with two names."""
    plain, model = load(folders, fn), load(folders, fn, device="cpu:0", runtime={"offload": True})
    x, texts = noise(plain, 2, 32, 32), PROMPTS[:2]
    expected, images = plain.encode(texts), plain.decode(x)
    log = watch_moves(monkeypatch, model)
    encoders = sorted(name for name in SIDE - {"vae"} if name in model.pipeline().components)
    cond = model.encode(texts)
    there = [(name, "cpu:0") for name in encoders]
    back = [(name, "cpu") for name in encoders]
    assert log == [*there, ("work", "encode"), ("work", "encode"), *back]  # once for all texts
    log.clear()
    model.encode(texts[::-1])
    assert log == []
    # not to the bit: a move copies the weights to another place, and sums depend on their start
    torch.testing.assert_close(model.decode(x), images, rtol=0, atol=1e-6)
    assert log == [("vae", "cpu:0"), ("work", "decode"), ("vae", "cpu")]
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)


def test_parts_go_back_after_an_error_too(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folders, "sd15", device="cpu:0", runtime={"offload": True})
    monkeypatch.setattr(model.pipeline(), "encode_prompt", lambda *_: 1 / 0)
    log = watch_moves(monkeypatch, model)
    with pytest.raises(ZeroDivisionError):
        model.encode(PROMPTS)
    assert log == [("text_encoder", "cpu:0"), ("work", "encode"), ("text_encoder", "cpu")]


# ----------------------------------------------------------------------------------- long prompts

LONG = "a red square and a blue circle " * 8  # 192 letters, each a token of the tiny tokenizers
SHORT = {"max_sequence_length": 24}
# the pipeline, how to load it and how to call encode_prompt
DIFFUSERS: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "sd3": (StableDiffusion3Pipeline, {}, (LONG, None, None), SHORT),
    "flux": (FluxPipeline, {}, (LONG,), SHORT),
    "sd15": (StableDiffusionPipeline, {"safety_checker": None}, (LONG, "cpu", 1, False), {}),
    "sdxl": (StableDiffusionXLPipeline, {}, (LONG,), {}),
}


def test_long_prompts_are_the_pipelines_and_are_named_once(folders: Folders, fn: str) -> None:
    """CLIP reads 77 tokens, of which two mark start and end, T5 here 24 with one mark."""
    t5 = fn in ("sd3", "flux")
    model = load(folders, fn, **(SHORT if t5 else {}))
    cut = "the prompt 'a red square and .* is cut: CLIP reads 77"
    with pytest.warns(UserWarning, match=cut) as caught:
        cond = model.encode([PROMPTS[0], LONG, "b" * 90])
        model.encode(["c" * 90])
    assert len(caught) == 1 and caught[0].filename == __file__
    letters, text = LONG.replace(" ", ""), str(caught[0].message).replace(" ", "")
    assert text.count(f"CLIPreads77tokens,without'{letters[75:]}'") == 1
    assert ("T5reads24tokens" in text) == ("largermax_sequence_length" in text) == t5

    # by a pipeline that diffusers loaded itself: embeds, (negative,) pooled
    kind, without, args, options = DIFFUSERS[fn]
    with torch.no_grad():
        found = kind.from_pretrained(folders[NAME[fn]], **without).encode_prompt(*args, **options)
    assert torch.equal(cond["embeds"][1:2], found[0])
    if fn != "sd15":
        assert torch.equal(cond["pooled"][1:2], found[1 if fn == "flux" else 2])


def test_what_is_read_whole_is_not_warned_of(
    folders: Folders, recwarn: pytest.WarningsRecorder
) -> None:
    load(folders, "sd15").encode(["a" * 75, *PROMPTS])
    assert [w for w in recwarn if "is cut" in str(w.message)] == []
