"""Attention back ends, and what attention is by default."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import ADAPTERS, PROMPTS, Folders, velocity, with_lora
from diffusers.models import attention_dispatch
from modelkit import FLASH, Kernels, gradients, perturb
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flowrl.core.errors import ModelError
from flowrl.models.runtime import HUB, LOCAL, NAMES, attend_in_groups, avoid_cudnn


def kernels(model: Any) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """Return velocity, gradients, and the kernels of both passes."""
    perturb(model, 0.05)
    model.encode(PROMPTS)  # the text encoders attend, too
    with Kernels() as noted:
        v = velocity(model)
        found = gradients(model, v.square().sum())
    return v.detach(), found, noted.seen


# each class of network once; SDXL's is that of Stable Diffusion 1, klein's that of FLUX.2
@pytest.mark.parametrize("fn", sorted({*ADAPTERS} - {"sdxl", "flux2_klein"}))
def test_a_back_end_reaches_every_attention(folders: Folders, fn: str) -> None:
    """By torch's names of the kernels; set_attention_backend reaches FLUX alone.

    Checkpointing computes anew outside of the call, by the same back end; one model's back end is
    not the next one's. In the UNets noise is divided by the signal left, and so is the kernels'
    rounding, which differs more on some processors (measured 1.1e-4 of the largest velocity).
    """
    rough = fn in ("sd15", "sdxl")
    share = 2e-4 if rough else 1e-5
    v, grads, seen = kernels(with_lora(folders, fn))
    assert {FLASH, f"{FLASH}_backward"} <= seen and not any("softmax" in name for name in seen)
    for checkpointing in (False, True):
        how = {"attention": "_native_math", "checkpointing": checkpointing}
        v_math, grads_math, seen_math = kernels(with_lora(folders, fn, runtime=how))
        assert any("softmax" in name for name in seen_math)
        assert not any("flash" in name for name in seen_math)
        torch.testing.assert_close(v_math, v, rtol=0, atol=share * max(1.0, float(v.abs().max())))
        most = max(float(grad.abs().max()) for grad in grads.values())
        for name, grad in grads.items():
            atol = 5e-3 * float(grad.abs().max()) + (share * most if rough else 0)
            torch.testing.assert_close(grads_math[name], grad, rtol=0, atol=atol)
    assert kernels(with_lora(folders, fn))[2] == seen


def test_in_bfloat16_on_a_cpu_short_sequences_attend_in_groups(folders: Folders) -> None:
    """By torch's names of the kernels: none is fused in the network's passes, which are noted
    without the encoders'. The velocity is as far from float32's as with the fused kernel."""
    reference = with_lora(folders, "sd3")
    perturb(reference, 0.05)
    exact, error = velocity(reference), {}
    for attention in ("auto", "native"):
        model = with_lora(folders, "sd3", dtype="bfloat16", runtime={"attention": attention})
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
    q, k, v = qkv
    ours, theirs = attend_in_groups(q, k, v), scaled_dot_product_attention(q, k, v)
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
        with_lora(folders, "sd15", runtime={"attention": name})


@pytest.mark.parametrize(
    ("name", "device", "trains", "stays"),
    [
        ("auto", "cuda", True, False),
        ("native", "cuda", True, False),
        ("_native_cudnn", "cuda", True, True),
        ("native", "cuda", False, True),
        ("auto", "cpu", True, True),
    ],
)
def test_where_it_trains_torch_does_not_pick_cudnn(
    name: str, device: str, trains: bool, stays: bool
) -> None:
    """torch's own switch, which needs no GPU."""
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        avoid_cudnn(name, device=torch.device(device), trains=trains)
        assert torch.backends.cuda.cudnn_sdp_enabled() is stays
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_names_are_diffusers_own() -> None:
    assert {"native", "flash", "xformers", "sage", "flex", "_flash_3", "_native_math"} <= set(LOCAL)
    assert {*NAMES} - {*LOCAL} == {name for name in NAMES if name.endswith(HUB)} != set()


def test_a_mask_is_heeded_in_bfloat16_on_a_cpu(folders: Folders) -> None:
    """UNets take masks: the last text token hidden by one, or by leaving it out, is the same."""
    model = with_lora(folders, "sd15", dtype="bfloat16")
    unet, x, time = model.network, torch.randn(1, 4, 8, 8).bfloat16(), torch.tensor([500.0])
    text = torch.randn(1, 6, unet.config.cross_attention_dim).bfloat16()
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]).bfloat16()
    with torch.no_grad():
        hidden = unet(x, time, text, encoder_attention_mask=mask).sample
        without, whole = unet(x, time, text[:, :5]).sample, unet(x, time, text).sample
    torch.testing.assert_close(hidden, without, rtol=0.02, atol=0.02)
    assert not torch.allclose(hidden, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fn", ["qwen_image", "z_image"])
def test_networks_that_mask_are_tried_with_a_mask(folders: Folders, fn: str) -> None:
    """torch's flash kernel takes none; it is refused at load, not in the first step."""
    able = "Available: native, _native_math"
    message = rf"'_native_flash' .* with the mask of its prompts: .*attn_mask.*{able}"
    with pytest.raises(ModelError, match=message):
        with_lora(folders, fn, runtime={"attention": "_native_flash"})
    velocity(with_lora(folders, fn, runtime={"attention": "_native_math"}))
    with_lora(folders, "sd15", runtime={"attention": "_native_flash"})  # which has none


# -------------------------------------------------------------------------------------- xformers


@pytest.fixture
def xformers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Stand in for the package, whose kernels are for CUDA alone: attention by its documentation,
    [B, M, H, K] with a bias that is added -> the shapes of q of all calls."""
    seen: list[tuple[int, ...]] = []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None = None,
        p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        assert p == 0.0
        seen.append(tuple(query.shape))
        scores = torch.einsum("bmhk,bnhk->bhmn", query, key) * (scale or query.shape[-1] ** -0.5)
        weights = (scores if attn_bias is None else scores + attn_bias).softmax(-1)
        return torch.einsum("bhmn,bnhk->bmhk", weights, value)

    ops = SimpleNamespace(memory_efficient_attention=attend)
    monkeypatch.setattr(attention_dispatch, "xops", ops, raising=False)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", True)
    return seen


@pytest.mark.parametrize(
    ("fn", "most"), [("sd3", 4 + 77 + 64), ("flux", 4 + 64), ("sdxl", 16), ("wan", 8)]
)
def test_xformers_gets_every_attention_in_its_own_layout(
    folders: Folders, xformers: list[tuple[int, ...]], fn: str, most: int
) -> None:
    """Velocity and gradients are native's; tokens come before heads.

    The longest sequence, by hand: 2 x 2 patches of the image with CLIP's 77 and T5's 64 tokens; the
    same with T5's; 4 x 4 latents; 2 moments of 2 x 2 patches.
    """
    plain = with_lora(folders, fn, runtime={"attention": "native"})
    model = with_lora(folders, fn, runtime={"attention": "xformers"})
    perturb(plain, 0.05)
    perturb(model, 0.05)
    expected, asked = velocity(plain), count_attention(plain)
    xformers.clear()
    v = velocity(model)
    assert len(xformers) == asked
    assert {shape[2] for shape in xformers} == {2}  # heads of all tiny networks
    assert max(shape[1] for shape in xformers) == most
    atol = 1e-5 * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(v, expected, rtol=0, atol=10 * atol)
    grads = gradients(plain, expected.square().sum())
    top = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in gradients(model, v.square().sum()).items():
        torch.testing.assert_close(grad, grads[name], rtol=0, atol=2e-4 * top)


def count_attention(model: Any) -> int:
    """Count torch's own kernel of attention in a forward pass."""
    count = 0

    class Count(Kernels):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            count += FLASH in str(func)
            return func(*args, **(kwargs or {}))

    model.encode(PROMPTS)  # the text encoders attend, too
    with Count(), torch.no_grad():
        velocity(model)
    return count


@pytest.mark.usefixtures("xformers")
@pytest.mark.parametrize("fn", ["qwen_image", "z_image"])
def test_xformers_is_refused_where_it_would_not_heed_a_mask(folders: Folders, fn: str) -> None:
    """diffusers 0.42 adds 1 for seen and 0 for hidden tokens where the mask is of booleans."""
    with pytest.raises(ModelError, match="'xformers' .*it does not heed a mask"):
        with_lora(folders, fn, runtime={"attention": "xformers"})
