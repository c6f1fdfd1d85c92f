"""Comparisons of toy configs, by a clock by which each iteration lasts half a second."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toykit import write_toy

from flowrl.runs.compare import compare as compare_module
from flowrl.runs.compare import one_run, tune
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import Comparison
from flowrl.training.trainer import Trainer

# 2 prompts x 4 images, 4 steps each; 3 of the steps are trained, at three calls each
COST = 2 * 4 * 4 + 3 * (2 * 4 * 3)
STEP = 0.5  # seconds of an iteration
SMALL = (
    "train.updates=1",
    "eval.steps=2",
    "eval.images=2",
    "eval.score=strict",
    "samples.prompts=2",
    "checkpoint.every=2",
)


def rehearse_few(patch: pytest.MonkeyPatch) -> None:
    """Rehearse 40 iterations in place of 10000."""
    for module in (compare_module, tune):
        patch.setattr(module, "MOST_ITERATIONS", 40)


def tick(patch: pytest.MonkeyPatch) -> None:
    """Let every iteration last half a second, and rehearse few of them."""
    ticks = itertools.count()
    patch.setattr(one_run, "clock", lambda: next(ticks) * STEP)
    rehearse_few(patch)


def toys(folder: Path, *names: str) -> tuple[str, ...]:
    """Write toy configs that differ in name and learning rate."""
    text = write_toy(folder).read_text()
    for number, name in enumerate(names):
        mine = text.replace("name: toy", f"name: {name}")
        mine = mine.replace("lr: 0.01", f"lr: {0.01 / (1 + number)}")
        (folder / f"{name}.yaml").write_text(mine)
    return tuple(str(folder / f"{name}.yaml") for name in names)


def plan(folder: Path, *names: str, **changes: Any) -> Comparison:
    """Compare toys with room for 3 iterations by evaluations and 5 by seconds."""
    what = Comparison(
        configs=toys(folder, *(names or ("toy-a",))),
        seeds=(0,),
        budgets=Budgets(2.5 * COST, 4.5 * STEP, 2),
        runs=folder / "runs",
        out=folder / "out" / "result.json",
        overrides=SMALL,
        plugins=("toykit",),
    )
    return what._replace(**changes)


def before_step(
    patch: pytest.MonkeyPatch, iteration: int, do: Callable[[], None], seed: int = 0
) -> None:
    """Do something when `iteration` of a run of `seed` begins."""
    step = Trainer.step

    def stepping(self: Trainer) -> dict[str, float]:
        if self.config.seed == seed and self.iteration == iteration:
            do()
        return step(self)

    patch.setattr(Trainer, "step", stepping)


def raising(error: BaseException) -> Callable[[], None]:
    """Return a function that raises an error."""

    def do() -> None:
        raise error

    return do


def no_training(patch: pytest.MonkeyPatch) -> None:
    """Fail if anything is trained."""
    error = AssertionError("nothing was left to train")
    patch.setattr(Trainer, "step", lambda self: raising(error)())


def scores(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what belongs to the machine."""
    configs = []
    for entry in result["configs"]:
        seeds = copy.deepcopy(entry["seeds"])
        for run in seeds:
            run.pop("load", None)
        configs.append({**entry, "seeds": seeds})
    return {**result, "configs": configs, "environments": None}
