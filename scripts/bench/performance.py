"""Measure a config on this machine's GPU, at real size with random weights: seconds by phase,
images/s, MFU, memory.

    python scripts/bench/performance.py sd3/flow_grpo train.prompts=4
    python scripts/bench/performance.py sd3/flow_grpo --kernels       # where the device's time goes
    python scripts/bench/performance.py flux/flow_grpo model.runtime.attention=flash

Writes assets/results/performance-<model>.json. Nothing is downloaded: the architectures come with
flowrl. MFU is the share of a device's peak that the model's own floating-point work makes up, after
PaLM (2204.02311, appendix B): what gradient checkpointing computes again does not count, though it
takes time.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from random_model import random_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flowrl.config.calls import Call
from flowrl.config.load import Config, load_config
from flowrl.config.sections import PromptsConfig
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.tables import size, terminal_width, text_table
from flowrl.core.types import RewardBatch, medians
from flowrl.cost.architecture import known_facts, tuning_of
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.fit_card import change
from flowrl.cost.phases import PHASES, on_gpu, wait
from flowrl.cost.time_shares import CARDS
from flowrl.evaluation.reward_call import frames_of
from flowrl.training.method import method_of
from flowrl.training.trainer import Trainer

RESULTS = Path(__file__).resolve().parents[2] / "assets" / "results"
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


def measure_throughput(
    config: Config,
    *,
    iterations: int = 2,
    vae: bool = False,
    kernels: bool = False,
) -> dict[str, Any]:
    """Run `iterations` after a warm-up with random weights -> figures, medians over them.

    Rewards are chance and prompts made up; without `vae` nothing is decoded. MFU needs a GPU of
    PEAKS and a 16-bit dtype. With `kernels` profile an iteration more, for the kernels that take
    longest. Raises ConfigError for less than one iteration and for a model that cannot be made.
    """
    if iterations < 1:
        raise ConfigError(f"performance: expected at least 1 iteration, got {iterations}")
    # random weights take as long as trained ones, and need no download
    config = stand_in(config)
    model = random_model(config, vae=vae)
    device = next(iter(model.trainable().values())).device
    # the first iteration also compiles and allocates, so it does not count
    trainer = Trainer(config, model=model)
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
    where, frames = "performance.chance", "first" if frames_of(config) > 1 else ""
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


def main() -> int:
    """Measure, print and write -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument("--iterations", type=int, default=2, help="after a warm-up")
    parser.add_argument("--vae", action="store_true", help="decode with a random VAE, too")
    parser.add_argument("--kernels", action="store_true", help="profile an iteration more")
    parser.add_argument("--json", type=Path, help="in place of performance-<model>.json")
    args = parser.parse_args()
    # what cannot be measured is a message and exit code 2, not a traceback
    try:
        config = load_config(args.config, args.overrides)
        options = {"iterations": args.iterations, "vae": args.vae, "kernels": args.kernels}
        result = measure_throughput(config, **options)
        out = args.json or RESULTS / f"performance-{Path(result['model']).name.lower()}.json"
        write_json(out, result)
    except FlowRLError as error:
        print(f"performance: {error}", file=sys.stderr)
        return 2
    print(throughput_table(result, width=terminal_width()))
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
