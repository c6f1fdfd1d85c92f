"""Measure a config at real size with random weights: seconds by phase, images/s, MFU and peak
memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.config.sections import PromptsConfig
from flowrl.core.errors import ConfigError
from flowrl.core.installation import environment
from flowrl.core.tables import size, text_table
from flowrl.core.types import RewardBatch, medians
from flowrl.cost.architecture import VIDEO, tuning_of
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.fit_card import change
from flowrl.cost.kernels import KernelWatch, kernels_table, summary
from flowrl.cost.mfu import utilisation
from flowrl.cost.overhead import PHASES, on_gpu, wait
from flowrl.cost.random_model import random_model
from flowrl.cost.sync_check import check_sync
from flowrl.evaluation.reward_call import frames_of
from flowrl.training.method import method_of
from flowrl.training.trainer import Trainer

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
    device; with `kernels` profile an iteration more, for what the device does in it. Raises
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
    profiled = {"kernels": _kernels(trainer, middle)} if kernels else {}
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
    where, frames = "flowrl.cost.throughput.chance", "first" if frames_of(config) > 1 else ""
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
    method, updates = trainer.method, range(planned.updates)
    calls = sum(method.trained_calls(update, before) for update in updates) / planned.updates
    states = (metrics["nfe"] - planned.nfe) / calls
    memory = {f"memory/{name}": float(count) for name, count in watch.memory.items()}
    return {**watch.seconds, **memory, "total": total, "states": states}


def _kernels(trainer: Trainer, middle: dict[str, float]) -> dict[str, Any]:
    """Profile one iteration -> what the device does while it samples, and while it trains."""
    watch = KernelWatch(("rollout", "train"), cuda=on_gpu())
    trainer.state.log = watch  # type: ignore[assignment]
    trainer.step()
    trainer.state.log = None
    return {
        name: summary(list(found.values()), middle[name]) for name, found in watch.found.items()
    }


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
    tuning, video = tuning_of(found.config), found.config.model.fn in VIDEO
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
        lines += ["", kernels_table(result["kernels"], width=width)]
    if "why_no_mfu" in result:
        lines.append(f"no MFU: {result['why_no_mfu']}")
    return "\n".join(lines)
