"""Measure a config at real size with random weights: seconds by phase, images/s, MFU, peak memory.

MFU is the share of a device's peak that the model's own floating-point work makes up, after PaLM
(2204.02311, appendix B): what gradient checkpointing computes again does not count, though it takes
time. `check_sync` sees that the sampling loop never makes the host wait for the device.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from random_model import random_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.config.sections import PromptsConfig
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.installation import environment
from flowrl.core.prompts import stream
from flowrl.core.tables import size, text_table
from flowrl.core.types import Cond, FlowModel, RewardBatch, medians
from flowrl.cost.architecture import known_facts, tuning_of
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.fit_card import change
from flowrl.cost.phases import PHASES, on_gpu, wait
from flowrl.cost.time_shares import CARDS
from flowrl.evaluation.reward_call import frames_of
from flowrl.training.method import method_of
from flowrl.training.trainer import Trainer

PEAKS = {card.pattern: card.short for card in CARDS}
"""Dense bfloat16 products, TFLOP/s, by torch's name of the device."""

MOST = 12  # kernels that are named
_ESTIMATED = {"rollout": "sampling", "decode": "decode", "train": "training"}


class PhaseWatch:
    """Stand in for a run's log: seconds of each phase, and on a GPU the most memory that was
    allocated in it."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.memory: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        yield
        wait()
        self.seconds[name] += time.perf_counter() - began
        if self.on_gpu:
            self.memory[name] = max(self.memory.get(name, 0), torch.cuda.max_memory_allocated())

    def progress(self, done: int, total: int) -> None:
        """Show nothing."""


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s by torch's name of it; None if it is not
    in the table."""
    found = [peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)]
    return found[0] * 1e12 if found else None


def utilisation(
    flops: dict[str, int], seconds: dict[str, float], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the share of a device's peak that each phase's work is, or why none can be given."""
    peak = peak_flops(device)
    if peak is None or dtype.itemsize != 2:
        why = (
            f"no peak of {device} is in the table"
            if peak is None
            else f"the peak is of 16-bit products, not {dtype}"
        )
        return {"peak_flops": "unknown", "mfu": None, "why_no_mfu": why}
    return {
        "peak_flops": peak,
        "mfu": {phase: work / seconds[phase] / peak for phase, work in flops.items()},
    }


class SyncGuard:
    """Stand in for a model: between the first and the last of so many calls the host must not wait
    for the device."""

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


def check_sync(trainer: Trainer, *, switch: Callable[[str], None] | None = None) -> int:
    """Sample an iteration's prompts and let any wait for the device between two network calls be an
    error -> calls.

    `switch` is torch.cuda.set_sync_debug_mode. Raises RunError with what waited.
    """
    # any prompts will do: waits do not depend on them
    switch = switch or torch.cuda.set_sync_debug_mode
    rows = stream(
        trainer.train_set, seed=trainer.config.seed, first=0, count=trainer.config.train.prompts
    )
    model = trainer.model
    # a first pass counts the calls, so that the second knows which one is the last
    try:
        counter = SyncGuard(model, 0, switch)
        vars(trainer)["model"] = counter
        trainer.sample(rows)
        vars(trainer)["model"] = SyncGuard(model, counter.seen, switch)
        trainer.sample(rows)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise RunError(f"the sampling loop makes the host wait for the device: {error}") from error
    finally:
        switch("default")
        vars(trainer)["model"] = model
    return counter.seen


def measure_throughput(
    config: Config,
    *,
    iterations: int = 2,
    vae: bool = False,
    sync_check: bool = False,
    kernels: bool = False,
) -> dict[str, Any]:
    """Run `iterations` after a warm-up with random weights -> figures, medians over them.

    Rewards are chance and prompts made up; without `vae` nothing is decoded. MFU needs a GPU of
    PEAKS and a 16-bit dtype. With `sync_check` first see that the sampling loop never waits for the
    device; with `kernels` profile an iteration more, for the kernels that take longest. Raises
    ConfigError for less than one iteration, for a model that cannot be made, and for a `sync_check`
    without a GPU; RunError if it waits.
    """
    if iterations < 1:
        raise ConfigError(f"performance: expected at least 1 iteration, got {iterations}")
    # random weights take as long as trained ones, and need no download
    config = stand_in(config)
    model = random_model(config, vae=vae)
    device = next(iter(model.trainable().values())).device
    if sync_check and device.type != "cuda":
        raise ConfigError(
            "--sync-check: needs a CUDA device, which a host can wait for; the model is on the "
            f"{device}"
        )
    # the first iteration also compiles and allocates, so it does not count
    trainer = Trainer(config, model=model)
    if sync_check:
        check_sync(trainer)
    trainer.step()
    rows = [_iteration(trainer, on_gpu=device.type == "cuda") for _ in range(iterations)]
    # medians over iterations, since one may be disturbed
    middle = medians(rows)
    profiled = {"kernels": _kernels(trainer)} if kernels else {}
    return {
        **_setting(config, device, iterations, vae),
        "seconds": {name: middle[name] for name in (*PHASES, "total")},
        "images_per_s": trainer.cost.images / middle["total"],
        "states": round(middle["states"]),
        **_work(config, device, trainer, middle),
        "memory": _memory(config, rows, vae=vae),
        "sync_check": "the sampling loop never waited for the device" if sync_check else "not made",
        **profiled,
        "environment": environment(),
    }


def stand_in(config: Config) -> Config:
    """Return the config with made-up prompts, and one reward by chance, which needs no weights.
    Raises ConfigError for one that trains on real images, which such prompts have not."""
    if method_of(config).graphs > 1:
        raise ConfigError(
            "performance: kl trains on real images of the prompts, and made-up prompts have none; "
            "set kl=null, and count as many states again"
        )
    if "reward" in method_of(config).needs:
        raise ConfigError(
            f"performance: loss {config.loss.fn} differentiates the rewards, and one by chance has "
            "no gradient; time another config of this model"
        )
    where, frames = "throughput.chance", "first" if frames_of(config) > 1 else ""
    reward = Call("rewards.chance", "chance", where, {}, function=chance, frames=frames)
    prompts = PromptsConfig(train="assets/shapes/train.jsonl", test="assets/shapes/test.jsonl")
    return replace(
        config,
        rewards={"chance": reward},
        aggregate=Call.bind("aggregate", {"fn": "weighted_sum"}),
        prompts=prompts,
        eval=replace(config.eval, score="", tuned=1.0),
    )


def chance(batch: RewardBatch) -> Tensor:
    """Score images by chance -> [L] in [0, 1), the same ones every time."""
    return torch.rand(len(batch.images), generator=torch.Generator().manual_seed(0))


def _iteration(trainer: Trainer, *, on_gpu: bool) -> dict[str, float]:
    """Run one iteration -> seconds of each phase and in all, bytes of each phase, states that were
    trained."""
    watch, planned, before = PhaseWatch(on_gpu=on_gpu), trainer.cost, trainer.steps_before
    trainer.state.log = watch  # type: ignore[assignment]
    wait()
    began = time.perf_counter()
    metrics = trainer.step()
    wait()
    total = time.perf_counter() - began
    trainer.state.log = None
    # the mean over optimizer steps of about equal size
    updates = range(planned.updates)
    calls = sum(trainer.trained_calls(update, before) for update in updates) / planned.updates
    states = (metrics["nfe"] - planned.nfe) / calls
    memory = {f"memory/{name}": float(count) for name, count in watch.memory.items()}
    return {**watch.seconds, **memory, "total": total, "states": states}


def _kernels(trainer: Trainer) -> list[dict[str, Any]]:
    """Profile one iteration -> name, seconds and calls of the kernels that take longest; on a CPU
    of PyTorch's operators."""
    kind = ProfilerActivity.CUDA if on_gpu() else ProfilerActivity.CPU
    took = "self_device_time_total" if on_gpu() else "self_cpu_time_total"
    with profile(activities=[kind]) as seen:
        trainer.step()
        wait()
    # the profiler counts microseconds
    rows = []
    for event in sorted(seen.key_averages(), key=lambda event: -getattr(event, took))[:MOST]:
        seconds = getattr(event, took) / 1e6
        rows.append({"name": event.key, "seconds": seconds, "calls": event.count})
    return rows


def _setting(config: Config, device: torch.device, iterations: int, vae: bool) -> dict[str, Any]:
    t, tuning = config.train, tuning_of(config)
    # all that the figures depend on; figures of other settings cannot be compared
    return {
        "model": str(config.model.kwargs["path"]),
        "weights": "random",
        "config": config.name,
        "device": _name(device),
        "dtype": str(tuning.dtype).removeprefix("torch."),
        "tune": tuning.tune,
        "runtime": tuning.runtime.model_dump(),
        "iterations": iterations,
        "image": [config.image.height, config.image.width],
        "batches": {
            "prompts": t.prompts,
            "group": t.group,
            "rollout": t.rollout_batch,
            "micro": t.micro_batch,
        },
        "vae": vae,
    }


def prepare(config: Config) -> None:
    """Work out the estimates that stand beside the figures, which takes seconds and no device;
    `measure_throughput` finds them done."""
    config = stand_in(config)
    estimate(_plain(config))
    estimate(_without_texts(config))


def _plain(config: Config) -> Config:
    """Return the config without checkpointing: what it repeats is no work of the model's own."""
    return change(config, "model.runtime.checkpointing", False)


def _without_texts(config: Config) -> Config:
    """Return the config without text encoders that would work on the device while an offloaded
    network is away; a random model has none."""
    if not tuning_of(config).runtime.offload:
        return config
    return change(config, "model.runtime.text_encoders", "cpu")


def _work(
    config: Config, device: torch.device, trainer: Trainer, middle: dict[str, float]
) -> dict[str, Any]:
    """Return the model's own work of an iteration and the share of the device's peak that it is."""
    found = estimate(_plain(config))
    share = middle["states"] / found.forecast.states  # those of weight 0 are not computed
    flops = {"rollout": found.flops["sampling"], "train": round(found.flops["training"] * share)}
    return {
        "flops": flops,
        **utilisation(flops, middle, _name(device), tuning_of(config).dtype),
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


def _memory(
    config: Config, rows: list[dict[str, float]], *, vae: bool
) -> dict[str, dict[str, int | None]]:
    """Return the measured peak of each phase beside its estimate without what random models do not
    have."""
    config = _without_texts(config)
    found, out = estimate(config), {}
    absent = _absent(found, vae=vae)
    for name, phase in _ESTIMATED.items():
        seen = [int(row[f"memory/{name}"]) for row in rows if f"memory/{name}" in row]
        guess = next(p.bytes for p in found.phases if p.name == phase) - absent
        out[name] = {
            "measured": max(seen, default=None),
            "estimate": guess if vae or name != "decode" else None,
        }
    return out


def _absent(found: Estimate, *, vae: bool) -> int:
    """Return the bytes of the parts that an estimate counts and a random model leaves out: a VAE
    that nothing asks for (that of videos is always there), and text encoders, unless these work on
    the CPU and are not in the estimate."""
    tuning, video = tuning_of(found.config), known_facts(found.config).video
    if tuning.runtime.offload or found.weights is None:
        return 0
    gone = 0
    for name, count in found.weights.others.items():
        there = name == "vae" and (vae or video)
        uncounted = name.startswith("text_encoder") and tuning.runtime.text_encoders == "cpu"
        if not there and not uncounted:
            gone += count * tuning.dtype.itemsize
    return gone


def throughput_table(result: dict[str, Any], *, width: int | None = None) -> str:
    """Set the figures as a table; `width` columns, None: any number."""
    # a row for each phase; a CPU has neither MFU nor a peak
    mfu, rows = result["mfu"] or {}, [["phase", "seconds", "MFU", "peak", "estimated"]]
    for name, value in result["seconds"].items():
        memory = result["memory"].get(name, {})
        peak, guess = memory.get("measured"), memory.get("estimate")
        share = f"{mfu[name]:.2f}" if name in mfu else ""
        sizes = [size(peak) if peak else "", size(guess) if peak and guess else ""]
        rows.append([name, f"{value:.3f}", share, *sizes])
    lines = [
        f"{result['model']} (random weights) on {result['device']}, {result['dtype']}, tune "
        f"{result['tune']}",
        "",
        text_table(rows, width=width),
        "",
        f"{result['images_per_s']:.2f} images/s",
    ]
    if "kernels" in result:
        found = [["kernel", "seconds", "calls"]]
        for one in result["kernels"]:
            found.append([one["name"][:60], f"{one['seconds']:.3f}", f"{one['calls']}"])
        lines += ["", text_table(found, width=width)]
    if "why_no_mfu" in result:
        lines.append(f"no MFU: {result['why_no_mfu']}")
    return "\n".join(lines)
