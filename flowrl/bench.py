"""Time an iteration by phase, and against the same network calls made bare."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from flowrl.batches import decision_nodes, decisions
from flowrl.config import Config
from flowrl.errors import ConfigError
from flowrl.log import environment
from flowrl.loop import Trainer
from flowrl.prompts import batch_for
from flowrl.types import Cond, FlowModel

PHASES = ("rollout", "decode", "reward", "train")


class _Clock:
    """A stand-in for the run logger that only times phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.name = ""
        self._began = 0.0

    def phase(self, name: str) -> _Clock:
        self.name = name
        return self

    def __enter__(self) -> None:
        wait()
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        wait()
        self.seconds[self.name] += time.perf_counter() - self._began


class _Call(NamedTuple):
    """One call of the network."""

    size: int
    graded: bool  # differentiated
    sampling: bool


class _Calls:
    """Stand in for a model and note each velocity call."""

    def __init__(self, model: FlowModel, clock: _Clock) -> None:
        self.model, self.clock = model, clock
        self.calls: list[_Call] = []

    def velocity(self, x: torch.Tensor, sigma: torch.Tensor, cond: Cond) -> torch.Tensor:
        self.calls.append(_Call(len(x), torch.is_grad_enabled(), self.clock.name == "rollout"))
        return self.model.velocity(x, sigma, cond)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def bench(config: Config, *, iterations: int = 3) -> dict[str, Any]:
    """Run `iterations` after a warm-up; every iteration is followed at once by its own calls made bare.

    The overhead ratio is the whole iteration's time over that of its network calls: the same number of velocity
    evaluations (no gradient), of forward + backward passes (and the reference's forward passes under a KL) and of VAE
    decodes, at the same batch sizes, on such tensors. What is left is mostly the rewards. `overhead_ratio_with_vae`
    counts the decodes as overhead, and `rollout_ratio` is of sampling alone, without decodes and rewards. With
    ``train.parts`` above 1, an iteration without overlap is timed too. All sides are timed in turn, so that a machine
    that slows down slows all; figures are medians over iterations (a plan may fork elsewhere each time).
    Raises ConfigError for less than one iteration.
    """
    if iterations < 1:
        raise ConfigError(f"bench: expected at least 1 iteration, got {iterations}")
    trainer = Trainer(config)
    trainer.step()
    rows: list[dict[str, float]] = []
    for _ in range(iterations):
        work = trainer.budget
        clock = _Clock()
        noted = _Calls(trainer.model, clock)
        trainer.log, trainer.model = clock, noted  # type: ignore[assignment]
        total = _step_seconds(trainer)
        trainer.model = noted.model
        apart = {"apart": _apart(trainer)} if config.train.parts > 1 and config.train.overlap else {}
        bare = {f"bare_{name}": value for name, value in _bare(trainer, noted.calls).items()}
        ratios = {"ratio": total / sum(bare.values()), "strict": total / (bare["bare_rollout"] + bare["bare_train"])}
        counts = {"images": work.images, "evaluations": work.evaluations, "decisions": work.decisions}
        counts["states"] = sum(call.size for call in noted.calls if call.graded)
        ratios["rollout_ratio"] = clock.seconds["rollout"] / bare["bare_rollout"]
        rows.append({"total": total, **clock.seconds, **bare, **ratios, **counts, **apart})
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    known = sum(middle[name] for name in PHASES)
    return {
        "config": config.name,
        "iterations": iterations,
        "seconds": {
            **{name: middle[name] for name in PHASES},
            "other": middle["total"] - known,
            "all": middle["total"],
        },
        "bare": {name: middle[f"bare_{name}"] for name in ("rollout", "decode", "train")},
        "overhead_ratio": middle["ratio"],
        "overhead_ratios": [row["ratio"] for row in rows],
        "overhead_ratio_with_vae": middle["strict"],
        "rollout_ratio": middle["rollout_ratio"],
        "rollout_ratios": [row["rollout_ratio"] for row in rows],
        **({"seconds_without_overlap": middle["apart"]} if "apart" in middle else {}),
        "images": round(middle["images"]),
        "images_per_s": median(row["images"] / row["total"] for row in rows),
        "velocity_evaluations": round(middle["evaluations"]),
        "decisions": round(middle["decisions"]),
        "states": round(middle["states"]),
        "environment": environment(),
    }


def _step_seconds(trainer: Trainer) -> float:
    wait()
    began = time.perf_counter()
    trainer.step()
    wait()
    return time.perf_counter() - began


def _apart(trainer: Trainer) -> float:
    """Time an iteration that scores each part before it samples the next -> seconds."""
    kept = trainer.config
    trainer.config = replace(kept, train=replace(kept.train, overlap=False))
    try:
        return _step_seconds(trainer)
    finally:
        trainer.config = kept


def _bare(trainer: Trainer, calls: list[_Call]) -> dict[str, float]:
    """Time the noted network calls again with nothing around them -> seconds by phase."""
    c = trainer.config
    ro = trainer.sample(batch_for(trainer.train_set, seed=c.seed, iteration=trainer.iteration, count=c.train.prompts))
    nodes = decision_nodes(ro)
    index = torch.arange(max(call.size for call in calls), device=nodes.device) % len(nodes)
    batch = decisions(ro, torch.ones(len(ro.x), device=nodes.device), nodes=nodes[index])
    seconds = {}
    for phase, sampling in (("rollout", True), ("train", False)):
        wait()
        began = time.perf_counter()
        for size, graded, _ in (call for call in calls if call.sampling == sampling):
            x, sigma, cond = batch.x[:size], batch.sigma[:size], {k: v[:size] for k, v in batch.cond.items()}
            with torch.set_grad_enabled(graded):
                v = trainer.model.velocity(x, sigma, cond)
                if graded:
                    v.sum().backward()
        wait()
        seconds[phase] = time.perf_counter() - began
    leaves = ro.x[ro.leaf].float()
    wait()
    began = time.perf_counter()
    with torch.no_grad():
        trainer.model.decode(leaves)
    wait()
    seconds["decode"] = time.perf_counter() - began
    trainer.optimizer.zero_grad(set_to_none=True)
    return seconds


def wait() -> None:
    """Wait for the GPU, if one is used."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def table(result: dict[str, Any]) -> str:
    """Say the figures in words."""
    seconds, bare = result["seconds"], result["bare"]
    lines = [f"{result['config']}: median of {result['iterations']} iterations", ""]
    lines += [f"  {name:<10}{seconds[name]:8.3f} s  {100 * seconds[name] / seconds['all']:5.1f} %" for name in seconds]
    lines += [
        "",
        f"  the same network calls bare: sampling {bare['rollout']:.3f} s, VAE {bare['decode']:.3f} s, "
        f"training {bare['train']:.3f} s",
        f"  overhead ratio {result['overhead_ratio']:.3f} (with the VAE's calls as overhead "
        f"{result['overhead_ratio_with_vae']:.3f}; of sampling alone {result['rollout_ratio']:.3f}); the rest: "
        f"rewards {seconds['reward']:.3f} s, "
        f"everything else {seconds['all'] - seconds['reward'] - sum(bare.values()):.3f} s",
        f"  {result['images_per_s']:.1f} pictures/s   {result['velocity_evaluations']} velocity evaluations   "
        f"{result['decisions']} decisions",
    ]
    if "seconds_without_overlap" in result:
        without = result["seconds_without_overlap"]
        lines.append(f"  without overlap of rewards and sampling {without:.3f} s: x{without / seconds['all']:.2f}")
    return "\n".join(lines)
