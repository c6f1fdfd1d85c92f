"""Time an iteration by phase, and how much of it is inside the calls of network and VAE."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.installation import environment
from flowrl.core.tables import text_table
from flowrl.core.types import Cond, FlowModel, medians
from flowrl.training.trainer import Trainer

PHASES = ("rollout", "decode", "reward", "train")
BARE = ("rollout", "decode", "train")
"""Phases that call the network or the VAE."""


def now() -> float:
    """Return the processor's seconds of this process, over all its threads: what else the machine
    does counts for nothing. With a GPU, those of the wall."""
    wait()
    return time.perf_counter() if on_gpu() else time.process_time()


class PhaseClock:
    """A stand-in for the run logger that only times phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.name = ""
        self._began = 0.0

    def phase(self, name: str) -> PhaseClock:
        self.name = name
        return self

    def progress(self, done: int, total: int) -> None:
        """Show nothing."""

    def __enter__(self) -> None:
        self._began = now()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += now() - self._began

    @contextmanager
    def booked(self, name: str) -> Iterator[None]:
        """Count the time inside for phase `name`, in whatever phase it passes: previews are decoded
        and scored, and stored images encoded, while images are sampled."""
        began, around = now(), self.name
        yield
        if around != name:
            passed = now() - began
            self.seconds[name] += passed
            self.seconds[around] -= passed


class CallTimer:
    """Stand in for a model and time its calls: the network forward and backward, the VAE, the text
    encoders."""

    def __init__(self, model: FlowModel, clock: PhaseClock) -> None:
        self.model, self.clock = model, clock
        self.seconds = dict.fromkeys((*BARE, "texts"), 0.0)
        self.states = 0  # that were differentiated
        self._began: float | None = None  # of the backward pass, while there is one

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the model's velocity [B, *]."""
        with self._timed("rollout" if self.clock.name == "rollout" else "train"):
            v = self.model.velocity(x, sigma, cond)
        if v.requires_grad:
            self.states += len(x)
            v.register_hook(self._backward_begins)
        return v

    def decode(self, x0: Tensor) -> Tensor:
        """Return the model's images [B, 3, H, W]."""
        with self._timed("decode"), self.clock.booked("decode"):
            return self.model.decode(x0)

    def latents(self, images: Tensor) -> Tensor:
        """Return the model's latents [B, *] of images [B, 3, H, W]."""
        with self._timed("decode"), self.clock.booked("decode"):
            found: Tensor = self.model.latents(images)  # type: ignore[attr-defined]
        return found

    def encode(self, prompts: list[str]) -> Cond:
        """Return the prompts' embeddings {name: [G, ...]}."""
        with self._timed("texts"):
            return self.model.encode(prompts)

    def __getattr__(self, name: str) -> Any:
        if name == "encode_with_sources":
            return self._timed("texts")(getattr(self.model, name))
        return getattr(self.model, name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = now()
        yield
        self.seconds[name] += now() - began

    def _backward_begins(self, gradient: Tensor) -> None:
        """Note that the gradient has come as far as v: from here to the end it is the network's."""
        if self._began is None:
            self._began = now()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._began is not None:
            self.seconds["train"] += now() - self._began
        self._began = None


def measure_overhead(
    config: Config, *, iterations: int = 3, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Run `iterations` after a warm-up, and time each call of the model inside them.

    `shares` says where the time goes, and the overhead ratio is the whole iteration's time over
    that of the network's calls, forward and backward, and of the VAE's. Both are taken in one run,
    on the processor's clock (on a GPU the wall's), so that other work on the machine does not move
    it. What is timed scores each part before it samples the next; with ``train.parts`` above 1 and
    overlap, an iteration with and one without are timed by the wall too. Figures are medians over
    iterations (a plan may fork elsewhere each time). ``progress`` hears how many are done. Raises
    ConfigError for less than one iteration.
    """
    if iterations < 1:
        raise ConfigError(f"bench: expected at least 1 iteration, got {iterations}")
    trainer = Trainer(config)
    trainer.encode_ahead(iterations + 1)
    trainer.step()
    rows = []
    for number in range(iterations):
        if progress is not None:
            progress(number, iterations)
        rows.append(_timed_iteration(trainer))
    if progress is not None:
        progress(iterations, iterations)
    return {"config": config.name, "iterations": iterations, **_summary(rows)}


def _timed_iteration(trainer: Trainer) -> dict[str, float]:
    """Run one iteration -> seconds, ratios and counts by name."""
    # the iteration, by phase and by call
    planned, clock = trainer.cost, PhaseClock()
    timer = CallTimer(trainer.model, clock)
    trainer.state.log, vars(trainer)["model"] = clock, timer  # type: ignore[assignment]
    wall, began = time.perf_counter(), now()
    score = trainer.reward_set.score
    trainer.reward_set.score = clock.booked("reward")(score)  # type: ignore[method-assign]
    with without_overlap(trainer):
        trainer.step()
    trainer.reward_set.score = score  # type: ignore[method-assign]
    total, wall = now() - began, time.perf_counter() - wall
    trainer.state.log, vars(trainer)["model"] = None, timer.model
    row = {"total": total, "wall": wall, **clock.seconds}

    # by the wall, what overlap is good for
    if trainer.config.train.parts > 1 and trainer.config.train.overlap:
        row["wall"] = _wall_seconds(trainer)
        with without_overlap(trainer):
            row["apart"] = _wall_seconds(trainer)

    # of it the calls alone, and how much was done
    row |= {f"bare_{name}": timer.seconds[name] for name in BARE}
    row |= {"texts": timer.seconds["texts"], "states": timer.states}
    return row | {"images": planned.images, "nfe": planned.nfe, "decisions": planned.decisions}


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians over iterations, as the result file has them."""
    # medians, since other programs disturb single iterations
    middle = medians(rows)
    seconds = {name: middle[name] for name in PHASES}
    seconds |= {"other": middle["total"] - sum(seconds.values()), "all": middle["total"]}
    bare = {name: middle[f"bare_{name}"] for name in BARE}
    apart = {"seconds_without_overlap": middle["apart"]} if "apart" in middle else {}
    counts = {name: round(middle[name]) for name in ("images", "nfe", "decisions", "states")}
    return {
        "clock": "wall" if on_gpu() else "processor",
        "seconds": seconds,
        "bare": bare,
        "shares": _shares(middle),
        "overhead_ratio": middle["total"] / sum(bare.values()),
        "wall_seconds": middle["wall"],
        **apart,
        **counts,
        "images_per_s": median(row["images"] / row["wall"] for row in rows),
        "environment": environment(),
    }


def _shares(middle: dict[str, float]) -> dict[str, float]:
    """Share the time of an iteration out to its parts; all of them are 1."""
    parts = {
        "network, sampling": middle["bare_rollout"],
        "network, training": middle["bare_train"],
        "VAE": middle["bare_decode"],
        "rewards": middle["reward"],
        "text encoders": middle["texts"],
        "around sampling": middle["rollout"] - middle["bare_rollout"] - middle["texts"],
        "around decoding": middle["decode"] - middle["bare_decode"],
        "around training": middle["train"] - middle["bare_train"],
    }
    shares = {name: seconds / middle["total"] for name, seconds in parts.items()}
    return shares | {"other": 1 - sum(shares.values())}


@contextmanager
def without_overlap(trainer: Trainer) -> Iterator[None]:
    """Let the trainer score each part before it samples the next."""
    kept = trainer.config
    vars(trainer)["config"] = replace(kept, train=replace(kept.train, overlap=False))
    try:
        yield
    finally:
        vars(trainer)["config"] = kept


def _wall_seconds(trainer: Trainer) -> float:
    """Time one more iteration by the wall."""
    wait()
    began = time.perf_counter()
    trainer.step()
    wait()
    return time.perf_counter() - began


def on_gpu() -> bool:
    """Say whether a GPU is used."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def wait() -> None:
    """Wait for the GPU, if one is used."""
    if on_gpu():
        torch.cuda.synchronize()


def overhead_table(result: dict[str, Any], *, width: int | None = None) -> str:
    """Set the figures as tables, with what follows from them; `width` columns, None: any number."""
    seconds = [[name, f"{value:.3f}"] for name, value in result["seconds"].items()]
    shares = [[name, f"{share:.1%}"] for name, share in result["shares"].items()]
    clock = "processor's seconds" if result["clock"] == "processor" else "seconds"
    lines = [f"{result['config']}: median of {result['iterations']} iterations, {clock}", ""]
    lines += [
        text_table([["part", "seconds"], *seconds], width=width),
        "",
        text_table([["where the time goes", "share"], *shares], width=width),
        "",
        f"overhead ratio {result['overhead_ratio']:.3f} over the calls of network and VAE alone",
        f"{result['images_per_s']:.1f} images/s   {result['nfe']} NFE   "
        f"{result['decisions']} decisions",
    ]
    if "seconds_without_overlap" in result:
        without = result["seconds_without_overlap"]
        lines.append(
            f"without overlap of rewards and sampling {without:.3f} s by the wall: "
            f"x{without / result['wall_seconds']:.2f}"
        )
    return "\n".join(lines)
