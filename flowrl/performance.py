"""Measure a config at real size with random weights: seconds by phase, pictures/s, MFU and peak memory.

MFU is the share of the device's peak that the model's own floating-point work makes up (PaLM, 2204.02311, appendix B):
what gradient checkpointing computes again does not count, though it takes time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flowrl.advice import change
from flowrl.bench import PHASES, wait
from flowrl.blueprint import tuning_of
from flowrl.config import Call, Config, PromptsConfig
from flowrl.errors import ConfigError, RunError
from flowrl.estimate import Estimate, estimate
from flowrl.feasible import trained_calls
from flowrl.log import environment
from flowrl.loop import Trainer
from flowrl.memory import size
from flowrl.prompts import batch_for
from flowrl.random_model import random_model
from flowrl.types import Cond, FlowModel, RewardBatch

# Dense matrix products in bfloat16 with sums in float32, TFLOP/s, without sparsity: NVIDIA's data sheets (H100, H200,
# A100, L40S, L4, A10) and white papers (Ada and Ampere GA102: GeForce, RTX A6000). By torch's name of the device.
PEAKS = {
    r"NVIDIA H100 80GB HBM3": 989.4,
    r"NVIDIA H100 PCIe": 756.0,
    r"NVIDIA H200": 989.4,
    r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": 312.0,
    r"NVIDIA L40S": 362.05,
    r"NVIDIA L4": 121.0,
    r"NVIDIA A10": 125.0,
    r"NVIDIA RTX A6000": 154.8,
    r"NVIDIA GeForce RTX 4090": 165.2,
    r"NVIDIA GeForce RTX 3090": 71.0,
}
_ESTIMATED = {"rollout": "sampling", "decode": "decode", "train": "training"}


class Watch:
    """Stand in for a run's log: seconds of each phase, and on a GPU the most memory that was allocated in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.memory: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        wait()
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        wait()
        self.seconds[name] += time.perf_counter() - began
        if on_gpu:
            self.memory[name] = max(self.memory.get(name, 0), torch.cuda.max_memory_allocated())


class Guard:
    """Stand in for a model: between the first and the last of so many calls the host must not wait for the device."""

    def __init__(self, model: FlowModel, calls: int, switch: Callable[[str], None]) -> None:
        self.model, self.calls, self.switch, self.seen = model, calls, switch, 0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the model's velocity [B, *], and count."""
        if self.seen == 0 and self.calls:
            self.switch("error")
        v = self.model.velocity(x, sigma, cond)
        self.seen += 1
        if self.seen == self.calls:
            self.switch("default")
        return v

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def measure(config: Config, *, iterations: int = 2, vae: bool = False, sync_check: bool = False) -> dict[str, Any]:
    """Run `iterations` after a warm-up with random weights -> figures, medians over them.

    Rewards are chance and prompts made up; without `vae` nothing is decoded. MFU needs a GPU of PEAKS and a 16-bit
    dtype. With `sync_check` first see that the sampling loop never waits for the device. Raises ConfigError for less
    than one iteration, for a model that cannot be made, and for a `sync_check` without a GPU; RunError if it waits.
    """
    if iterations < 1:
        raise ConfigError(f"performance: expected at least 1 iteration, got {iterations}")
    config = stand_in(config)
    model = random_model(config, vae=vae)
    device = next(iter(model.trainable().values())).device
    if sync_check and device.type != "cuda":
        raise ConfigError(f"--sync-check: needs a CUDA device, which a host can wait for; the model is on the {device}")
    trainer = Trainer(config, model=model)
    if sync_check:
        check_sync(trainer)
    trainer.step()
    rows = [_iteration(trainer) for _ in range(iterations)]
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    return {
        **_setting(config, device, iterations, vae),
        "seconds": {name: middle[name] for name in (*PHASES, "total")},
        "images_per_s": trainer.budget.images / middle["total"],
        "states": round(middle["states"]),
        **_work(config, device, trainer, middle),
        "memory": _memory(config, rows, vae=vae),
        "sync_check": "the sampling loop never waited for the device" if sync_check else "not made",
        "environment": environment(),
    }


def stand_in(config: Config) -> Config:
    """Return the config with made-up prompts, and one reward by chance, which needs no weights."""
    reward = Call("rewards.chance", "chance", "flowrl.performance.chance", {}, function=chance)
    prompts = PromptsConfig(train="assets/shapes/train.jsonl", test="assets/shapes/test.jsonl")
    return replace(config, rewards={"chance": reward}, prompts=prompts, eval=replace(config.eval, score="", tuned=1.0))


def chance(batch: RewardBatch) -> Tensor:
    """Score pictures by chance -> [L] in [0, 1), the same ones every time."""
    return torch.rand(len(batch.images), generator=torch.Generator().manual_seed(0))


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s by torch's name of it; None if it is not in the table."""
    found = [peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)]
    return found[0] * 1e12 if found else None


def check_sync(trainer: Trainer, *, switch: Callable[[str], None] | None = None) -> int:
    """Sample an iteration's prompts and let any wait for the device between two network calls be an error -> calls.

    `switch` is torch.cuda.set_sync_debug_mode. Raises RunError with what waited.
    """
    switch = switch or torch.cuda.set_sync_debug_mode
    rows = batch_for(trainer.train_set, seed=trainer.config.seed, iteration=0, count=trainer.config.train.prompts)
    model = trainer.model
    try:
        counter = Guard(model, 0, switch)
        trainer.model = counter
        trainer.sample(rows)
        trainer.model = Guard(model, counter.seen, switch)
        trainer.sample(rows)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise RunError(f"the sampling loop makes the host wait for the device: {error}") from error
    finally:
        switch("default")
        trainer.model = model
    return counter.seen


def _iteration(trainer: Trainer) -> dict[str, float]:
    """Run one iteration -> seconds of each phase and in all, bytes of each phase, states that were trained."""
    watch, planned = Watch(), trainer.budget
    trainer.log = watch  # type: ignore[assignment]
    wait()
    began = time.perf_counter()
    metrics = trainer.step()
    wait()
    total = time.perf_counter() - began
    trainer.log = None
    states = (metrics["cost"] - planned.evaluations) / trained_calls(trainer.config)
    memory = {f"memory/{name}": float(count) for name, count in watch.memory.items()}
    return {**watch.seconds, **memory, "total": total, "states": states}


def _setting(config: Config, device: torch.device, iterations: int, vae: bool) -> dict[str, Any]:
    t, tuning = config.train, tuning_of(config)
    return {
        "model": str(config.model.kwargs["path"]),
        "weights": "random",
        "config": config.name,
        "device": _name(device),
        "dtype": str(tuning.dtype).removeprefix("torch."),
        "tune": tuning.tune,
        "runtime": tuning.runtime._asdict(),
        "iterations": iterations,
        "image": [config.image.height, config.image.width],
        "batches": {"prompts": t.prompts, "group": t.group, "rollout": t.rollout_batch, "micro": t.micro_batch},
        "vae": vae,
    }


def _work(config: Config, device: torch.device, trainer: Trainer, middle: dict[str, float]) -> dict[str, Any]:
    """Return the model's own work of an iteration and the share of the device's peak that it is."""
    plain = change(config, "model.runtime.checkpointing", False)
    found = estimate(plain)
    share = middle["states"] / found.forecast.states  # those of weight 0 are not computed
    flops = {"rollout": found.flops["sampling"], "train": round(found.flops["training"] * share)}
    return {"flops": flops, **utilisation(flops, middle, _name(device), tuning_of(config).dtype)}


def utilisation(flops: dict[str, int], seconds: dict[str, float], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the share of a device's peak that each phase's work is, or why none can be given."""
    peak = peak_flops(device)
    if peak is None or dtype.itemsize != 2:
        why = f"no peak of {device} is in the table" if peak is None else f"the peak is of 16-bit products, not {dtype}"
        return {"peak_flops": "unknown", "mfu": None, "why_no_mfu": why}
    return {"peak_flops": peak, "mfu": {phase: work / seconds[phase] / peak for phase, work in flops.items()}}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


def _memory(config: Config, rows: list[dict[str, float]], *, vae: bool) -> dict[str, dict[str, int | None]]:
    """Return the measured peak of each phase beside its estimate without what random models do not have."""
    found, out = estimate(config), {}
    absent = _absent(found, vae=vae)
    for name, phase in _ESTIMATED.items():
        seen = [int(row[f"memory/{name}"]) for row in rows if f"memory/{name}" in row]
        guess = next(p.bytes for p in found.phases if p.name == phase) - absent
        out[name] = {"measured": max(seen, default=None), "estimate": guess if vae or name != "decode" else None}
    return out


def _absent(found: Estimate, *, vae: bool) -> int:
    """Return the bytes of the parts that an estimate counts and a random model leaves out."""
    if tuning_of(found.config).runtime.offload or found.sizes is None:
        return 0
    gone = sum(count for name, count in found.sizes.others.items() if not (vae and name == "vae"))
    return gone * tuning_of(found.config).dtype.itemsize


def table(result: dict[str, Any]) -> str:
    """Say the figures in words."""
    seconds, mfu = result["seconds"], result["mfu"] or {}
    lines = [f"{result['model']} (random weights) on {result['device']}, {result['dtype']}, tune {result['tune']}", ""]
    for name, value in seconds.items():
        share = f"  MFU {mfu[name]:.2f}" if name in mfu else ""
        memory = result["memory"].get(name, {})
        peak = f"  peak {size(memory['measured'])}" if memory.get("measured") else ""
        guess = f"  (estimated {size(memory['estimate'])})" if peak and memory.get("estimate") else ""
        lines.append(f"  {name:<8}{value:9.3f} s{share}{peak}{guess}")
    lines += ["", f"  {result['images_per_s']:.2f} pictures/s"]
    return "\n".join(lines + ([f"  no MFU: {result['why_no_mfu']}"] if "why_no_mfu" in result else []))
