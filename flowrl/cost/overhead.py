"""Time an iteration by phase, and against the same network calls made bare."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from flowrl.algorithms.nodes import trained_nodes
from flowrl.config.load import Config
from flowrl.core.environment import environment
from flowrl.core.errors import ConfigError
from flowrl.core.prompts import batch_for
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Cond, FlowModel
from flowrl.training.trainer import Trainer

PHASES = ("rollout", "decode", "reward", "train")


class PhaseClock:
    """A stand-in for the run logger that only times phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.name = ""
        self._began = 0.0

    def phase(self, name: str) -> PhaseClock:
        self.name = name
        return self

    def __enter__(self) -> None:
        wait()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        wait()
        self.seconds[self.name] += time.perf_counter() - self._began


class NetworkCall(NamedTuple):
    """One call of the network."""

    size: int
    graded: bool  # differentiated
    sampling: bool


class CallRecorder:
    """Stand in for a model and note each velocity call."""

    def __init__(self, model: FlowModel, clock: PhaseClock) -> None:
        self.model, self.clock = model, clock
        self.calls: list[NetworkCall] = []

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, cond: Cond) -> torch.Tensor:
        self.calls.append(
            NetworkCall(len(x), torch.is_grad_enabled(), self.clock.name == "rollout")
        )
        return self.model.velocity(x, sigma, cond)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def bench(config: Config, *, iterations: int = 3) -> dict[str, Any]:
    """Run `iterations` after a warm-up; every iteration is followed at once by its own calls made
    bare.

    The overhead ratio is the whole iteration's time over that of its network calls: the same number
    of velocity evaluations (no gradient), of forward + backward passes (and the reference's forward
    passes under a KL) and of VAE decodes, at the same batch sizes, on such tensors. What is left is
    mostly the rewards. `overhead_ratio_with_vae` counts the decodes as overhead, and
    `rollout_ratio` is of sampling alone, without decodes and rewards. With ``train.parts`` above 1,
    an iteration without overlap is timed too. All sides are timed in turn, so that a machine that
    slows down slows all; figures are medians over iterations (a plan may fork elsewhere each time).
    Raises ConfigError for less than one iteration.
    """
    if iterations < 1:
        raise ConfigError(f"bench: expected at least 1 iteration, got {iterations}")
    trainer = Trainer(config)
    trainer.step()
    rows = [_timed_iteration(trainer) for _ in range(iterations)]
    return {"config": config.name, "iterations": iterations, **_summary(rows)}


def _timed_iteration(trainer: Trainer) -> dict[str, float]:
    """Run one iteration, then its network calls alone -> seconds, ratios and counts by name."""
    # The iteration, by phase, with a note of each network call.
    planned, clock = trainer.cost, PhaseClock()
    recorder = CallRecorder(trainer.model, clock)
    trainer.log, trainer.model = clock, recorder  # type: ignore[assignment]
    total = seconds_of(trainer.step)
    trainer.model = recorder.model
    row = {"total": total, **clock.seconds}

    # The same without overlap, and the same calls bare.
    if trainer.config.train.parts > 1 and trainer.config.train.overlap:
        row["apart"] = _seconds_without_overlap(trainer)
    bare = _bare_seconds(trainer, recorder.calls)
    row |= {f"bare_{name}": value for name, value in bare.items()}

    # What one is to the other, and how much was done.
    row["ratio"] = total / sum(bare.values())
    row["ratio_with_vae"] = total / (bare["rollout"] + bare["train"])
    row["rollout_ratio"] = clock.seconds["rollout"] / bare["rollout"]
    row["states"] = sum(call.size for call in recorder.calls if call.graded)
    return row | {"images": planned.images, "nfe": planned.nfe, "decisions": planned.decisions}


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians over iterations, as the result file has them."""
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    seconds = {name: middle[name] for name in PHASES}
    seconds |= {"other": middle["total"] - sum(seconds.values()), "all": middle["total"]}
    apart = {"seconds_without_overlap": middle["apart"]} if "apart" in middle else {}
    return {
        "seconds": seconds,
        "bare": {name: middle[f"bare_{name}"] for name in ("rollout", "decode", "train")},
        "overhead_ratio": middle["ratio"],
        "overhead_ratios": [row["ratio"] for row in rows],
        "overhead_ratio_with_vae": middle["ratio_with_vae"],
        "rollout_ratio": middle["rollout_ratio"],
        "rollout_ratios": [row["rollout_ratio"] for row in rows],
        **apart,
        "images": round(middle["images"]),
        "images_per_s": median(row["images"] / row["total"] for row in rows),
        "nfe": round(middle["nfe"]),
        "decisions": round(middle["decisions"]),
        "states": round(middle["states"]),
        "environment": environment(),
    }


def seconds_of(work: Callable[[], Any]) -> float:
    """Time some work, with the GPU's share of it."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def _seconds_without_overlap(trainer: Trainer) -> float:
    """Time an iteration that scores each part before it samples the next."""
    kept = trainer.config
    trainer.config = replace(kept, train=replace(kept.train, overlap=False))
    try:
        return seconds_of(trainer.step)
    finally:
        trainer.config = kept


def _bare_seconds(trainer: Trainer, calls: list[NetworkCall]) -> dict[str, float]:
    """Time the noted network calls again with nothing around them -> seconds by phase."""
    # Inputs of the right sizes: the draws of one more rollout.
    config = trainer.config
    rows = batch_for(
        trainer.train_set,
        seed=config.seed,
        iteration=trainer.iteration,
        count=config.train.prompts,
        balance=config.train.balance,
    )
    forest = trainer.sample(rows)
    likelihood = trainer.method.likelihood
    nodes = trained_nodes(forest, likelihood.trains)
    index = torch.arange(max(call.size for call in calls), device=nodes.device) % len(nodes)
    ones = torch.ones(len(forest.x), device=nodes.device)
    streams = NodeStreams(forest.tree.group, "overhead")
    batch = likelihood.batch(forest, ones, nodes[index], streams)

    def repeat(sampling: bool) -> None:
        for call in calls:
            if call.sampling == sampling:
                _call_again(trainer.model, batch, call)

    def decode() -> None:
        with torch.no_grad():
            trainer.model.decode(leaves)

    # The calls of sampling, those of training, and the VAE's.
    seconds = {"rollout": seconds_of(lambda: repeat(True))}
    seconds["train"] = seconds_of(lambda: repeat(False))
    leaves = forest.x[forest.leaf].float()
    seconds["decode"] = seconds_of(decode)
    trainer.optimizer.zero_grad(set_to_none=True)
    return seconds


def _call_again(model: FlowModel, batch: Batch, call: NetworkCall) -> None:
    """Repeat one network call on the first rows of a batch, with its backward pass if it had
    one."""
    size = call.size
    cond = {name: rows[:size] for name, rows in batch.cond.items()}
    with torch.set_grad_enabled(call.graded):
        v = model.velocity(batch.x[:size], batch.sigma[:size], cond)
        if call.graded:
            v.sum().backward()


def wait() -> None:
    """Wait for the GPU, if one is used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def table(result: dict[str, Any]) -> str:
    """Say the figures in words."""
    seconds, bare = result["seconds"], result["bare"]
    lines = [f"{result['config']}: median of {result['iterations']} iterations", ""]
    lines += [
        f"  {name:<10}{seconds[name]:8.3f} s  {100 * seconds[name] / seconds['all']:5.1f} %"
        for name in seconds
    ]
    lines += [
        "",
        f"  the same network calls bare: sampling {bare['rollout']:.3f} s, VAE "
        f"{bare['decode']:.3f} s, "
        f"training {bare['train']:.3f} s",
        f"  overhead ratio {result['overhead_ratio']:.3f} (with the VAE's calls as overhead "
        f"{result['overhead_ratio_with_vae']:.3f}; of sampling alone "
        f"{result['rollout_ratio']:.3f}); the rest: "
        f"rewards {seconds['reward']:.3f} s, "
        f"everything else {seconds['all'] - seconds['reward'] - sum(bare.values()):.3f} s",
        f"  {result['images_per_s']:.1f} images/s   {result['nfe']} velocity "
        "evaluations   "
        f"{result['decisions']} decisions",
    ]
    if "seconds_without_overlap" in result:
        without = result["seconds_without_overlap"]
        lines.append(
            f"  without overlap of rewards and sampling {without:.3f} s: "
            f"x{without / seconds['all']:.2f}"
        )
    return "\n".join(lines)
