"""What the tests of training share: trainers of the toy, their gradients, and their checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from toykit import toy

from flowrl.config.load import Config
from flowrl.core.needs import needs, needs_of
from flowrl.core.types import Cond, FlowModel, RewardBatch, Rollout
from flowrl.models.toy import LinearFlow
from flowrl.training import checkpoint
from flowrl.training.batches import SharedForest
from flowrl.training.learn import learn
from flowrl.training.method import method_of
from flowrl.training.parts import parts_of
from flowrl.training.rollout import collect
from flowrl.training.run import Iteration
from flowrl.training.task import Task
from flowrl.training.trainer import Trainer, give_credit

KL = "kl={fn: transition_kl, beta: 0.1}"
# 4 images from one root, 2 + 2 + 4 decisions of 1 + 2 + 2 states
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}"
ONE = ("train.updates=1", "train.max_grad_norm=.inf")


def trainer_for(folder: Path, *overrides: str, model: FlowModel | None = None) -> Trainer:
    """Return a trainer of the toy config with overrides."""
    return Trainer(toy(folder, *overrides), model=model)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copy the trained weights."""
    return {name: p.detach().clone() for name, p in trainer.params.items()}


def unchanged(trainer: Trainer, before: dict[str, Tensor]) -> bool:
    """Say whether the trained weights are still the same bits."""
    return all(torch.equal(p, before[name]) for name, p in trainer.params.items())


def shift(trainer: Trainer, by: float = 0.05) -> None:
    """Move the trained weights away from those that training started from."""
    with torch.no_grad():
        for p in trainer.params.values():
            p.add_(by)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Join tensors into one row."""
    return torch.cat([t.detach().flatten() for t in tensors])


def gradients(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Tensor]], dict[str, float]]:
    """Run one iteration whose optimizer only hands over the gradient of each step."""
    got: list[dict[str, Tensor]] = []

    def grab() -> None:
        grads = {name: p.grad for name, p in trainer.params.items()}
        got.append({name: grad.clone() for name, grad in grads.items() if grad is not None})

    monkeypatch.setattr(trainer.optimizer, "step", grab)
    metrics = trainer.step()
    return got, metrics


def put(trainer: Trainer, **things: Any) -> None:
    """Put other things in the place of those that a trainer has; it is a frozen record."""
    vars(trainer).update(things)


def watch(trainer: Trainer, name: str = "loss") -> list[Any]:
    """Let the loss of a trainer, or its kl, note what it is given -> the list that it fills."""
    seen, plain = list[Any](), getattr(trainer.method, name)

    @needs(*needs_of(plain))
    def noted(data: Any) -> Any:
        seen.append(data)
        return plain(data)

    changed: dict[str, Any] = {name: noted}
    put(trainer, method=replace(trainer.method, **changed))
    return seen


def task_of(config: Config, *, sharded: bool = False) -> Task:
    """Return what is known of a config before anything is loaded, in one process."""
    method = method_of(config)
    parts = parts_of(config, method)
    return Task(config=config, method=method, parts=parts, sharded=sharded)


def credited(trainer: Trainer, rows: list[int] | None = None) -> Iteration:
    """Sample and score the rows of this iteration, and give credit, in the loop's own way."""
    rows = trainer.rows() if rows is None else rows
    it = Iteration(rows, range(len(rows)), collect(trainer, rows))
    give_credit(trainer, it)
    return it


def learnt(
    trainer: Trainer, ro: Rollout, advantage: Tensor, rows: list[int] | None = None
) -> dict[str, float]:
    """Learn from a rollout with these advantages [V] -> metrics."""
    rows = trainer.rows() if rows is None else rows
    it = Iteration(rows, range(len(rows)), None, forest=SharedForest(ro), rollout=ro)
    it.advantage = advantage
    learn(trainer, it)
    return it.metrics


class Weighed(NamedTuple):
    """A sampled and scored iteration, before anything is learnt."""

    ro: Rollout
    batch: RewardBatch
    values: dict[str, Tensor]
    weight: Tensor
    metrics: dict[str, float]


def weighed(trainer: Trainer, rows: list[int] | None = None) -> Weighed:
    """Sample and score the rows of this iteration, and give each node its advantage."""
    found = collect(trainer, trainer.rows() if rows is None else rows)
    leaf, tree = found.rollout.leaf, found.rollout.tree
    weight, metrics = trainer.reward_set.advantages(
        found.values, found.batch, leaf, tree, trainer.method.credit
    )
    return Weighed(*found, weight, metrics)


class Broken:
    """Give back NaN at one denoising step: in one row while sampling, or in all in training."""

    def __init__(self, model: LinearFlow, *, step: int, training: bool, row: int = 0) -> None:
        self.model, self.training, self.row = model, training, row
        self.sigma = model.sigmas(4, 16, 16)[step]

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        v = self.model.velocity(x, sigma, cond)
        if torch.is_grad_enabled() != self.training:
            return v
        hit = sigma == self.sigma
        if not self.training:
            hit = hit & (torch.arange(len(x)) == self.row)
        return torch.where(hit[:, None, None, None], v * math.nan, v)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def halves(
    make: Callable[..., Trainer], folder: Path, first: int = 2, last: int = 2, *moved: str
) -> tuple[Trainer, Trainer, list[dict[str, float]]]:
    """Train in one go, and in two halves with a checkpoint between them, of which the second is
    made anew, with the overrides `moved` -> both trainers, and the metrics, which must be the same
    to the bit."""
    whole, begun = make(), make()
    metrics = [whole.step() for _ in range(first + last)]
    again = [begun.step() for _ in range(first)]
    begun.save(folder / "middle")
    torch.manual_seed(99)  # nothing may depend on torch's global stream
    second = make(*moved)
    second.load(folder / "middle")
    assert second.iteration == first and second.rows() == begun.rows()
    assert again + [second.step() for _ in range(last)] == metrics
    assert unchanged(second, weights_of(whole))
    return whole, second, metrics


def rise(curve: list[float], count: int) -> float:
    """Compare the last `count` iterations of a run with its first -> the change of the mean."""
    return mean(curve[-count:]) - mean(curve[:count])


def files_of(trainer: Trainer, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Save a checkpoint -> the tensors of each of its files."""
    trainer.save(folder)
    return checkpoint.load(folder)[0]


def same_files(one: dict[str, dict[str, Tensor]], two: dict[str, dict[str, Tensor]]) -> bool:
    """Say whether two checkpoints hold the same bits and types under the same names."""
    if one.keys() != two.keys():
        return False
    return all(_same(tensors, two[file]) for file, tensors in one.items())


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    pairs = [(tensor, two.get(name, torch.zeros(0))) for name, tensor in one.items()]
    equal = [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs]
    return one.keys() == two.keys() and all(equal)
