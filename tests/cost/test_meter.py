"""Bytes and floating-point work of networks without numbers, against real tensors and PyTorch's own
counters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from estimatekit import MODELS, OF_THE_CPU, made
from modelkit import noise
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flowrl.core.pixels import round_8bit
from flowrl.cost import meter
from flowrl.cost.fit_card import change
from flowrl.cost.meta_run import (
    CallCost,
    MetaRun,
    Workload,
    _held,
    _inputs,
    _network,
    meta_run,
    workload_of,
)
from flowrl.cost.meter import DeviceRules, Meter, saved_for_backward

STATES = 4
CASES = [(name, "false") for name in MODELS if "deep" not in name and "layers" not in name]
CASES += [(name, "true") for name in ("sd3, full", "flux, LoRA, bfloat16")]


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_an_operation_that_is_known_is_made_as_it_ran(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cost is the same where each operation runs, where the second block repeats the first
    one's, and where all is known; and then few of them run."""
    workload = workload_of(made(tmp_path, name, "{attention: native}"))

    def costs() -> list[CallCost]:
        run = MetaRun(workload)
        size = {"batch": 2, "height": 64, "width": 48}
        return [run.velocity(2), run.training(2), run.step(), run.decoding(4, **size)]

    monkeypatch.setattr(meter, "_known", {})
    first, again = costs(), costs()
    repeated = [one for one in meter._known.values() if one is not None]
    assert first == again and len(repeated) > 50
    monkeypatch.setattr(meter, "_made", lambda func, args, kwargs: func(*args, **kwargs))
    assert costs() == first


@pytest.mark.parametrize(("name", "checkpointing"), CASES)
def test_against_real_tensors(tmp_path: Path, name: str, checkpointing: str) -> None:
    """Saved bytes: the adapter's own forward pass on the CPU. Peaks: PyTorch's profiler, which sees
    every allocation.

    Saved bytes within 2 % (exact in float32; in bfloat16 the CPU's normalisations keep other
    statistics, and Qwen-Image's guidance keeps latents). Peaks within 20 %: kernels of the CPU have
    buffers of their own, which weigh on models as small as these.
    """
    config = made(tmp_path, name, f"{{checkpointing: {checkpointing}, attention: native}}")
    model, found = config.call("model")(), MetaRun(workload_of(config, device="cpu"))
    for parameter in model.trainable().values():
        parameter.grad = torch.zeros_like(parameter)
    x, cond = noise(model, STATES, 64, 48), model.encode(["a red dot"] * STATES)
    sigma = model.sigmas(4, 64, 48)[:1].expand(STATES)
    network = model.network
    with saved_for_backward(_held(network)) as saved:
        v = model.velocity(x, sigma, cond)
    near = 0.02 if "bfloat" in name or "qwen" in name else 1e-4
    assert found.training(STATES).saved == pytest.approx(saved.bytes, rel=near)
    del v
    real = allocated(lambda: model.velocity(x, sigma, cond).sum().backward())
    assert found.training(STATES).peak == pytest.approx(real, rel=0.2)
    with torch.no_grad():
        real = allocated(lambda: model.velocity(x, sigma, cond))
    assert found.velocity(STATES).peak == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize(("count", "batch"), [(5, 2), (3, 8)])
def test_decoding_against_real_tensors(tmp_path: Path, count: int, batch: int) -> None:
    """Within 5 % of what the profiler sees: the stand-in for the VAE is as good as the VAE."""
    config = change(made(tmp_path, "sd3, full"), "model.decode_batch", batch)
    model, latents = config.call("model")(), torch.randn(count, 16, 8, 6)
    found = MetaRun(workload_of(config)).decoding(count, batch=batch, height=64, width=48)
    real = allocated(lambda: round_8bit(model.decode(latents.clone())))
    assert found.peak == pytest.approx(real, rel=0.05)


def allocated(work: Callable[[], Any]) -> int:
    """Return the most bytes that were allocated at once while working, by the profiler's record of
    the allocator."""
    # what checkpointing left behind, in cycles, would be freed under the profiler's eyes
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


class _Flash(TorchFunctionMode):
    """CUDA's own flash attention, whose choice by torch would ask a driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args if args else (kwargs["query"], kwargs["key"], kwargs["value"])
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)[0]


@pytest.mark.parametrize(
    "name", ["sd3, full, bfloat16", "flux, some layers, bfloat16", "sdxl, full, bfloat16"]
)
def test_autocast_is_that_of_cuda(tmp_path: Path, name: str) -> None:
    """Oracle: torch's own CUDA autocast and attention on fake CUDA tensors, which need no GPU.
    Within 1 %."""
    workload = workload_of(made(tmp_path, name))
    real = _saved_on_cuda(workload)
    assert MetaRun(workload).training(STATES).saved == pytest.approx(real, rel=0.01)
    # the CPU's autocast leaves norms in bfloat16
    assert MetaRun(workload._replace(device="cpu")).training(STATES).saved < real


@pytest.mark.parametrize("name", ["flux, LoRA, bfloat16", "sd3, full"])
def test_norms_are_those_of_cuda(tmp_path: Path, name: str) -> None:
    """The same oracle without autocast: torch's kernel for RMS norms on fake CUDA tensors. A CPU's
    keep more."""
    workload = workload_of(made(tmp_path, name))
    real = _saved_on_cuda(workload)
    assert MetaRun(workload).training(STATES).saved == pytest.approx(real, rel=0.01)
    assert MetaRun(workload._replace(device="cpu")).training(STATES).saved > 1.02 * real


def _saved_on_cuda(workload: Workload) -> int:
    """Return what torch itself saves on fake CUDA tensors, under its own autocast if there is
    any."""
    network = _network(workload)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        for module in network.modules():
            _move(module._parameters)
            _move(module._buffers)
        inputs = {k: _on_cuda(v) for k, v in _inputs(workload, STATES).items()}
        held = [*network.parameters(), *network.buffers()]
        autocast = _autocast() if workload.tuning.autocast else nullcontext()
        with autocast, saved_for_backward(held) as saved, _Flash():
            out = network(**inputs, return_dict=False)[0].float()
        real = saved.bytes
    assert out.requires_grad
    return real


@contextmanager
def _autocast() -> Iterator[None]:
    """Turn CUDA's autocast on; `torch.autocast` does not where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [False, True])
def test_norms_in_one_pass_keep_and_take_what_cudas_kernel_does(
    dtype: torch.dtype, trained: bool
) -> None:
    """x and 4 bytes a row are kept, and the result is as large as x; the backward pass copies a
    gradient that is not contiguous. Oracle of what is kept: torch's kernel on fake CUDA tensors."""
    shape, size, rows = (2, 5, 3, 8), 240 * dtype.itemsize, 30
    x, weight = (torch.empty(n, dtype=dtype, device="meta") for n in (shape, (8,)))
    x.requires_grad_()
    weight.requires_grad_(trained)
    with DeviceRules(one_pass_norms=True), Meter([x, weight]) as meter:
        with saved_for_backward([weight]) as saved:
            out = F.rms_norm(x, (8,), weight, 1e-6)
        assert saved.bytes == size + rows * 4
        assert meter.now == meter.peak == size + rows * 4
        back = torch.empty(2, 3, 5, 8, dtype=dtype, device="meta").transpose(1, 2)
        before = meter.now
        torch.autograd.grad(out, [x, weight] if trained else [x], back)
        assert meter.peak == before + 2 * size + trained * weight.nbytes
    with FakeTensorMode(), torch.device("cuda"):
        there = [torch.empty(n, dtype=dtype) for n in (shape, (8,))]
        there[0].requires_grad_()
        with saved_for_backward(there[1:]) as real:
            F.rms_norm(there[0], (8,), there[1], 1e-6)
    assert saved.bytes == real.bytes


def test_only_cuda_normalises_in_one_pass(tmp_path: Path) -> None:
    """Not a CPU, not with the option off, and not compiled."""
    otherwise = (("one_pass_norms", False), ("compile", True))
    config = made(tmp_path, "z_image, full")
    off, compiled = (change(config, f"model.runtime.{n}", v) for n, v in otherwise)
    found = meta_run(workload_of(config)).training(STATES)
    own = meta_run(workload_of(off)).training(STATES)
    assert found.saved < own.saved and found.peak < own.peak and found.flops == own.flops
    assert MetaRun(workload_of(config, device="cpu")).training(STATES).saved == own.saved
    assert meta_run(workload_of(compiled)).training(STATES).saved == own.saved


def _move(table: Any) -> None:
    """Put the parameters or buffers of a module onto the fake device."""
    for key, old in table.items():
        if old is not None:
            new = torch.empty(old.shape, dtype=old.dtype)
            trained = isinstance(old, nn.Parameter)
            table[key] = nn.Parameter(new, old.requires_grad) if trained else new


def _on_cuda(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_cuda(inner) for name, inner in value.items()}
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value


def test_activations_grow_with_the_micro_batch_and_checkpointing_saves_most(tmp_path: Path) -> None:
    """Linear in the batch, to the byte per latent, but for a batch of one, whose products of a
    single row keep less; blocks' inputs only under checkpointing."""
    config = made(tmp_path, "flux, LoRA, bfloat16")
    plain = meta_run(workload_of(config))
    two, four, eight = (plain.training(n).saved for n in (2, 4, 8))
    assert four - two == (eight - four) / 2
    saving = meta_run(workload_of(change(config, "model.runtime.checkpointing", True)))
    assert saving.training(4).saved < four / 5 and saving.training(4).peak < plain.training(4).peak
    assert saving.training(4).flops > plain.training(4).flops  # blocks are computed twice
    assert saving.velocity(4) == plain.velocity(4)


def test_flops_of_a_linear_layer_and_of_attention() -> None:
    """Forward 2 per weight and row, backward twice that; attention 4 B H L^2 d, by flash 2.5 times
    that back."""
    x, w = (
        torch.empty(5, 7, device="meta", requires_grad=True),
        torch.empty(11, 7, device="meta", requires_grad=True),
    )
    with Meter() as meter:
        out = F.linear(x, w)
        assert meter.flops == 2 * 5 * 7 * 11
        out.sum().backward()
    assert meter.flops == 3 * 2 * 5 * 7 * 11
    q = torch.empty(2, 3, 16, 8, device="meta", requires_grad=True)
    with DeviceRules(), Meter() as meter:
        attended = F.scaled_dot_product_attention(q, q, q)
        assert meter.flops == 4 * 2 * 3 * 16**2 * 8
        attended.sum().backward()
    assert meter.flops == 4 * 2 * 3 * 16**2 * 8 * 3.5


@pytest.mark.parametrize("name", ["sd3, LoRA, guidance", "sdxl, full, bfloat16"])
def test_flops_against_torch_on_real_tensors(tmp_path: Path, name: str) -> None:
    config = made(tmp_path, name, "{attention: native}")
    model, found = config.call("model")(), MetaRun(workload_of(config, device="cpu"))
    x, cond = noise(model, STATES, 64, 48), model.encode(["a red dot"] * STATES)
    sigma = model.sigmas(4, 64, 48)[:1].expand(STATES)
    with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as counter:
        v = model.velocity(x, sigma, cond)
        forward = counter.get_total_flops()
        v.sum().backward()
    assert found.velocity(STATES).flops == forward
    assert found.training(STATES).flops == counter.get_total_flops() > 2 * forward
