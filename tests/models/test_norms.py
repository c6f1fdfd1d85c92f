"""RMS norms of diffusers in one pass, against diffusers' own and a formula."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from adapterkit import Folders, with_lora
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from flowrl.models import runtime as runtime_module
from flowrl.models.runtime import OnePassRMSNorm, Runtime, one_pass, set_up

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
