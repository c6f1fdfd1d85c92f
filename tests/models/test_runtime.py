"""How a network runs: checkpointing, offload, tf32, norms in one pass, and what is said aloud."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, PROMPTS, Folders, tiny_name, velocity, with_lora
from diffusers import (
    FluxPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.models.normalization import RMSNorm
from modelkit import counted, gradients, noise, perturb
from torch import Tensor, nn

from flowrl.config.load import load_config
from flowrl.models import runtime as runtime_module
from flowrl.models.flux import FluxOptions
from flowrl.models.options import checked_options
from flowrl.models.runtime import OnePassRMSNorm, Runtime, one_pass, set_up
from flowrl.models.sd3 import SD3Options

BLOCKS = {
    "sd3": {"JointTransformerBlock"},
    "flux": {"FluxTransformerBlock", "FluxSingleTransformerBlock"},
    "sd15": {"BasicTransformerBlock"},
    "wan": {"WanTransformerBlock"},
    "qwen_image": {"QwenImageTransformerBlock"},
    "z_image": {"ZImageTransformerBlock"},
    "flux2": {"Flux2TransformerBlock", "Flux2SingleTransformerBlock"},
}


CHECKPOINTING = {"checkpointing": True}


@pytest.fixture(params=ADAPTERS)
def fn(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_config_sets_the_options_and_defaults_change_nothing() -> None:
    assert SD3Options("x").how == SD3Options("x", runtime=Runtime()).how == Runtime()
    model = "model={fn: flux, path: x, runtime: {checkpointing: true, cache: texts}}"
    kwargs = load_config("shapes/flow_grpo", [model]).model.kwargs
    found = checked_options(FluxOptions, **kwargs)
    assert found.runtime == Runtime(checkpointing=True, cache="texts")


# ---------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("fn", sorted({*ADAPTERS} - {"sdxl", "flux2_klein"}))
def test_checkpointing_computes_blocks_again_and_changes_no_gradient(
    folders: Folders, fn: str
) -> None:
    """In sampling it does nothing."""
    plain, thrifty = with_lora(folders, fn), with_lora(folders, fn, runtime=CHECKPOINTING)
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


# ---------------------------------------------------------------------------------------- offload

SIDE = {"text_encoder", "text_encoder_2", "text_encoder_3", "vae"}


def watch_moves(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[tuple[str, str]]:
    """Note (part, device) of each move of a part, and what works in between."""
    log: list[tuple[str, str]] = []
    pipeline = model.pipeline()
    named = {id(pipeline.components.get(name)): name for name in SIDE}
    named[id(model.network)] = "network"
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
    plain, model = (
        with_lora(folders, fn),
        with_lora(folders, fn, device="cpu:0", runtime={"offload": True}),
    )
    x, texts = noise(plain, 2, 32, 32), PROMPTS[:2]
    expected, images = plain.encode(texts), plain.decode(x)
    log = watch_moves(monkeypatch, model)
    encoders = sorted(name for name in SIDE - {"vae"} if name in model.pipeline().components)
    cond = model.encode(texts)
    there = [(name, "cpu:0") for name in encoders]
    back = [(name, "cpu") for name in encoders]
    # once for all texts, with the network away
    alone = [*there, ("work", "encode"), ("work", "encode"), *back]
    assert log == [("network", "cpu"), *alone, ("network", "cpu:0")]
    log.clear()
    model.encode(texts[::-1])
    assert log == []
    # not to the bit: a move copies the weights to another place, and sums depend on their start
    torch.testing.assert_close(model.decode(x), images, rtol=0, atol=1e-6)
    # a VAE of videos works once for each
    assert list(dict.fromkeys(log)) == [("vae", "cpu:0"), ("work", "decode"), ("vae", "cpu")]
    torch.testing.assert_close(cond, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("fn", "offload"), [(fn, True) for fn in ADAPTERS] + [("sd3", False)])
def test_text_encoders_can_work_on_the_cpu_for_ever(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, fn: str, offload: bool
) -> None:
    """The network then keeps the device while prompts are encoded, and no encoder is moved."""
    moved: list[str] = []
    move = nn.Module.to

    def to(self: nn.Module, *args: Any, **options: Any) -> nn.Module:
        if "cpu:0" in map(str, args):
            moved.append(type(self).__name__)
        return move(self, *args, **options)

    monkeypatch.setattr(nn.Module, "to", to)
    runtime = {"text_encoders": "cpu", "offload": offload}
    model = with_lora(folders, fn, device="cpu:0", runtime=runtime)
    parts = model.pipeline().components
    kinds = {type(parts[name]).__name__ for name in SIDE - {"vae"} if name in parts}
    assert kinds and not kinds & set(moved)
    assert str(model.text_device) == "cpu"
    log = watch_moves(monkeypatch, model)
    cond = model.encode(PROMPTS[:2])
    assert log == [("work", "encode")] * 2
    torch.testing.assert_close(cond, with_lora(folders, fn).encode(PROMPTS[:2]), rtol=0, atol=1e-5)


def test_parts_go_back_after_an_error_too(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_lora(folders, "sd15", device="cpu:0", runtime={"offload": True})
    monkeypatch.setattr(model.pipeline(), "encode_prompt", lambda *_: 1 / 0)
    log = watch_moves(monkeypatch, model)
    with pytest.raises(ZeroDivisionError):
        model.encode(PROMPTS)
    alone = [("text_encoder", "cpu:0"), ("work", "encode"), ("text_encoder", "cpu")]
    assert log == [("network", "cpu"), *alone, ("network", "cpu:0")]


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


@pytest.mark.parametrize("fn", DIFFUSERS)
def test_long_prompts_are_the_pipelines_and_are_named_once(folders: Folders, fn: str) -> None:
    """CLIP reads 77 tokens, of which two mark start and end, T5 here 24 with one mark."""
    t5 = fn in ("sd3", "flux")
    model = with_lora(folders, fn, **(SHORT if t5 else {}))
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
        found = kind.from_pretrained(folders[tiny_name(fn)], **without).encode_prompt(
            *args, **options
        )
    assert torch.equal(cond["embeds"][1:2], found[0])
    if fn != "sd15":
        assert torch.equal(cond["pooled"][1:2], found[1 if fn == "flux" else 2])


@pytest.mark.parametrize(("fn", "limit"), [("qwen_image", 24), ("z_image", 21)])
def test_what_a_language_model_reads(folders: Folders, fn: str, limit: int) -> None:
    """Qwen-Image drops the template before the prompt, Z-Image counts its three tokens; a letter
    is a token."""
    model, long = folders.load(fn, tune="none", **SHORT), "red square blue circle " * 3
    read = long[:limit]
    same = model.encode([f"{read}a", f"{read}b"])["embeds"]
    other = model.encode([read[:-1] + "z"])["embeds"]
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], other[0])
    model = folders.load(fn, tune="none", **SHORT)
    told = f"Qwen reads {limit} tokens, without '{long[limit:].strip()}'. Qwen reads more"
    with pytest.warns(UserWarning, match=re.escape(told)):
        model.encode([read, long])


def test_what_is_read_whole_is_not_warned_of(
    folders: Folders, recwarn: pytest.WarningsRecorder
) -> None:
    with_lora(folders, "sd15").encode(["a" * 75, *PROMPTS])
    assert [w for w in recwarn if "is cut" in str(w.message)] == []


# ---------------------------------------------------------------------------------------- dtype


def test_automatic_dtype(folders: Folders) -> None:
    # the expectation is read from the kernel's own list of the processor's features, not from torch
    listed = Path("/proc/cpuinfo")
    if torch.cuda.is_available() or not listed.exists():
        pytest.skip("needs a Linux machine without a GPU")
    flags = listed.read_text(encoding="utf-8").split()
    short = "avx512_bf16" in flags or "amx_bf16" in flags
    model = folders.load("sd3", tune="full", dtype="auto")
    assert model.dtype == (torch.bfloat16 if short else torch.float32)
    assert next(iter(model.trainable().values())).dtype == torch.float32


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("asked", [False, True])
def test_products_are_short_only_if_asked(asked: bool) -> None:
    cpu = torch.device("cpu")
    set_up(nn.Linear(2, 2), Runtime(tf32=asked), dtype=torch.float32, device=cpu, trains=True)
    assert torch.backends.cuda.matmul.allow_tf32 is asked


DIM, EPS = 64, 1e-6
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def norms(dtype: torch.dtype) -> tuple[RMSNorm, OnePassRMSNorm]:
    """Return diffusers' norm and one that takes one pass, with the same weight."""
    torch.manual_seed(0)
    own = RMSNorm(DIM, eps=EPS)
    nn.init.normal_(own.weight, 1.0, 0.3)
    own.to(dtype)
    fused = copy.deepcopy(own)
    one_pass(fused)
    assert type(fused) is OnePassRMSNorm
    return own, fused


def formula(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, written out; diffusers squares in float32 even where x
    is float64."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Rows [B, L, D], heads [B, L, H, D] of Qwen-Image, and heads [B, H, L, D] as SD3 cuts them
    from rows."""
    torch.manual_seed(1)
    heads = torch.randn(2, 5, 3, DIM, dtype=torch.float64).to(dtype)
    return [heads[:, :, 0].contiguous(), heads, heads.transpose(1, 2)]


def test_in_float32_it_is_diffusers_norm_and_lies_in_memory_as_that_does() -> None:
    own, fused = norms(torch.float32)
    for x in inputs(torch.float32):
        torch.testing.assert_close(fused(x), own(x), rtol=1e-6, atol=1e-6)
        assert fused(x).stride() == own(x).stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_a_short_dtype_it_is_no_farther_from_the_exact_norm(dtype: torch.dtype) -> None:
    """It rounds once, diffusers twice."""
    own, fused = norms(dtype)
    for x in inputs(dtype):
        exact = formula(x.double(), own.weight.double())
        off = [float((norm(x) - exact).detach().square().mean()) for norm in (fused, own)]
        assert fused(x).dtype == own(x).dtype == dtype
        assert off[0] < 0.9 * off[1]


def test_gradients_are_those_of_the_formula() -> None:
    _, fused = norms(torch.float64)
    for x in inputs(torch.float64):
        torch.manual_seed(2)
        x, back = x.detach().requires_grad_(), torch.randn_like(x)
        found = torch.autograd.grad(fused(x), (x, fused.weight), back)
        true = torch.autograd.grad(formula(x, fused.weight), (x, fused.weight), back)
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_unlike_dtypes_are_left_to_diffusers(dtype: torch.dtype, weight: torch.dtype) -> None:
    own, fused = norms(weight)
    for x in inputs(dtype):
        assert torch.equal(fused(x), own(x)) and fused(x).dtype == own(x).dtype


def test_under_cudas_autocast_nothing_is_widened() -> None:
    """PyTorch's RMS norm is on autocast's list of what is computed, and left, in float32."""
    own, fused = norms(torch.bfloat16)
    x = inputs(torch.bfloat16)[1]
    with _autocast():
        assert torch.equal(fused(x), own(x)) and fused(x).dtype == torch.bfloat16
    wide = norms(torch.float32)
    with _autocast():
        torch.testing.assert_close(wide[1](x.float()), wide[0](x.float()), rtol=1e-6, atol=1e-6)


@contextmanager
def _autocast() -> Iterator[None]:
    """Turn CUDA's autocast on; `torch.autocast` does not where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_other_norms_stay_and_weights_keep_their_names() -> None:
    """Without a weight, with a bias, over two dimensions, of which diffusers averages one, or of a
    class of its own."""

    class Other(RMSNorm):  # type: ignore[misc]
        pass

    kept = [RMSNorm(DIM, EPS, elementwise_affine=False), RMSNorm(DIM, EPS, bias=True)]
    kept += [RMSNorm((2, DIM), EPS), Other(DIM, EPS), nn.RMSNorm(DIM)]
    network = nn.ModuleList([RMSNorm(DIM, EPS), *kept])
    kinds, state = [type(norm) for norm in kept], network.state_dict()
    one_pass(network)
    assert [type(norm) for norm in network] == [OnePassRMSNorm, *kinds]
    assert network.state_dict().keys() == state.keys()
    network.load_state_dict(state)
    assert type(pickle.loads(pickle.dumps(network[0]))) is OnePassRMSNorm  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("device", "options", "fused"),
    [
        (CUDA, {}, True),
        (CUDA, {"one_pass_norms": False}, False),
        (CUDA, {"compile": True}, False),
        (CPU, {}, False),
    ],
)
def test_which_networks_get_it(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, options: dict[str, Any], fused: bool
) -> None:
    """On CUDA, unless it is turned off or the compiler does it."""
    for name in ("avoid_cudnn", "set_attention", "compile_blocks"):
        monkeypatch.setattr(runtime_module, name, lambda *_, **__: None)
    network = nn.Sequential(RMSNorm(DIM, EPS))
    set_up(network, Runtime(**options), dtype=torch.float32, device=device, trains=True)
    assert (type(network[0]) is OnePassRMSNorm) == fused


@pytest.mark.parametrize("fn", ["sd3", "qwen_image", "z_image"])
def test_networks_on_a_cpu_stay_as_they_are(folders: Folders, fn: str) -> None:
    """Each has diffusers' norms, under LoRA too, and none takes one pass."""
    network = with_lora(folders, fn).network
    kinds = {type(module) for module in network.modules()}
    assert OnePassRMSNorm not in kinds and RMSNorm in kinds
    one_pass(network)
    assert RMSNorm not in {type(module) for module in network.modules()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Values and gradients against the formula in float64, and by the kernel alone."""
    _, fused = norms(dtype)
    fused.cuda().requires_grad_(False)
    near = 1e-5 if dtype == torch.float32 else 0.02
    for one in inputs(dtype):
        x, y = one.cuda().requires_grad_(), one.double().cuda().requires_grad_()
        found, true = fused(x), formula(y, fused.weight.double())
        torch.testing.assert_close(found.double(), true, rtol=near, atol=near)
        back = torch.randn_like(found)
        found.backward(back)
        true.backward(back.double())
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=near, atol=near)
        with torch.profiler.profile() as seen:
            fused(x.detach())
        ran = {event.key for event in seen.key_averages()}
        assert "aten::_fused_rms_norm" in ran and not ran & {"aten::mul", "aten::copy_"}
