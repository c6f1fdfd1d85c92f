"""Time an iteration by phase, as `flowrl bench` shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.installation import environment
from flowrl.core.tables import text_table
from flowrl.core.types import medians
from flowrl.training.trainer import Trainer

PHASES = ("rollout", "decode", "reward", "train")


class PhaseClock:
    """A stand-in for the run logger that only times phases, by the wall."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        wait()
        began = time.perf_counter()
        yield
        wait()
        self.seconds[name] += time.perf_counter() - began

    def progress(self, done: int, total: int) -> None:
        """Show nothing."""


def measure_phases(
    config: Config, *, iterations: int = 3, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Run `iterations` after a warm-up -> the medians of their seconds, by phase and in all, and
    what was done in one.

    What is timed by phase scores each part before it samples the next; with ``train.parts`` above 1
    and overlap, iterations with it are timed, too. ``progress`` hears how many are done. Raises
    ConfigError for less than one iteration.
    """
    if iterations < 1:
        raise ConfigError(f"bench: expected at least 1 iteration, got {iterations}")
    trainer = Trainer(config)
    overlaps = config.train.parts > 1 and config.train.overlap
    trainer.encode_ahead((1 + overlaps) * iterations + 1)
    trainer.step()
    rows = []
    for number in range(iterations):
        if progress is not None:
            progress(number, iterations)
        clock = PhaseClock()
        trainer.state.log = clock  # type: ignore[assignment]
        with without_overlap(trainer):
            row = {"all": _seconds(trainer)}
        trainer.state.log = None
        row |= {**clock.seconds, "other": row["all"] - sum(clock.seconds.values())}
        if overlaps:
            row["overlapped"] = _seconds(trainer)
        rows.append(row)
    if progress is not None:
        progress(iterations, iterations)
    # medians, since other programs disturb single iterations
    seconds, planned = medians(rows), trainer.cost
    least = min(seconds["all"], seconds.get("overlapped", seconds["all"]))
    return {
        "config": config.name,
        "iterations": iterations,
        "seconds": seconds,
        "images": planned.images,
        "images_per_s": planned.images / least,
        "nfe": planned.nfe,
        "decisions": planned.decisions,
        "environment": environment(),
    }


def _seconds(trainer: Trainer) -> float:
    """Time one more iteration by the wall."""
    wait()
    began = time.perf_counter()
    trainer.step()
    wait()
    return time.perf_counter() - began


@contextmanager
def without_overlap(trainer: Trainer) -> Iterator[None]:
    """Let the trainer score each part before it samples the next."""
    kept = trainer.config
    vars(trainer)["config"] = replace(kept, train=replace(kept.train, overlap=False))
    try:
        yield
    finally:
        vars(trainer)["config"] = kept


def on_gpu() -> bool:
    """Say whether a GPU is used."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def wait() -> None:
    """Wait for the GPU, if one is used."""
    if on_gpu():
        torch.cuda.synchronize()


def phases_table(result: dict[str, Any], *, width: int | None = None) -> str:
    """Set the figures as a table, with what follows from them; `width` columns, None: any
    number."""
    seconds = dict(result["seconds"])
    overlapped, whole = seconds.pop("overlapped", None), seconds["all"]
    rows = [["part", "seconds", "share"]]
    for name in (*PHASES, "other", "all"):
        rows.append([name, f"{seconds[name]:.3f}", f"{seconds[name] / whole:.1%}"])
    lines = [
        f"{result['config']}: median of {result['iterations']} iterations",
        "",
        text_table(rows, width=width),
        "",
        f"{result['images_per_s']:.1f} images/s   {result['nfe']} NFE   "
        f"{result['decisions']} decisions",
    ]
    if overlapped is not None:
        lines.append(
            f"with overlap of rewards and sampling {overlapped:.3f} s: x{whole / overlapped:.2f}"
        )
    return "\n".join(lines)
