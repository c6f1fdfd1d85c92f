"""The run under examination: the config with two prompts an iteration, loaded, sampled and scored
once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.types import Cond, FlowModel, Rollout
from flowrl.cost.phases import PhaseClock
from flowrl.evaluation.sources import encode_rows
from flowrl.training.rollout import Collected, collect
from flowrl.training.trainer import Trainer
from flowrl.training.weights import put_weights

PROMPTS = 2
TRIED = 50  # iterations that are looked at for one in which the policy learns


@dataclass
class ExaminedRun:
    """A trainer of two prompts, the prompts, and what it sampled of them with the weights that it
    starts from."""

    config: Config  # as it was asked for
    trainer: Trainer
    rows: list[int]
    clock: PhaseClock
    start: dict[str, Tensor]  # the trained weights before anything was done
    found: Collected
    known: set[str] = field(default_factory=set)  # what was found so far

    @property
    def model(self) -> FlowModel:
        """Return the model."""
        return self.trainer.model

    @property
    def rollout(self) -> Rollout:
        """Return the sampled forest."""
        return self.found.rollout

    @property
    def texts(self) -> list[str]:
        """Return the prompts by group id."""
        return self.trainer.train_set.texts_of(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the network's arithmetic."""
        return getattr(self.model, "dtype", torch.float32)

    @property
    def rounding(self) -> float:
        """Return the largest difference that is rounding in the network's arithmetic."""
        return 1e-4 if self.dtype == torch.float32 else 5e-2

    def encode(self, groups: list[int]) -> Cond:
        """Encode the prompts of these group ids, with what they start from."""
        run = self.trainer
        return encode_rows(self.model, run.train_set, [self.rows[g] for g in groups], run.size)

    def has(self, *names: str) -> bool:
        """Say whether one of these was found, so that what follows from it need not be said."""
        return not self.known.isdisjoint(names)

    def heal(self) -> None:
        """Put the trained weights back."""
        put_weights(self.trainer.params, self.start, Path(self.config.source))


def smaller(config: Config) -> Config:
    """Return the config with `PROMPTS` prompts an iteration, in one part, and as many updates as
    these allow."""
    t = config.train
    count = min(PROMPTS, t.prompts)
    updates = max(1, t.updates * count // t.prompts)
    return replace(config, train=replace(t, prompts=count, updates=updates, parts=1))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy named tensors as they are now."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def admit(config: Config, model: FlowModel | None = None) -> ExaminedRun:
    """Load what the config names, sample and score two prompts. Raises what a run would raise."""
    clock = PhaseClock()
    trainer = Trainer(smaller(config), model=model, log=clock)
    start = copied(trainer.params)
    # an iteration in which the policy learns
    while trainer.iteration < TRIED and not trainer.trains_policy():
        trainer.state.iteration += 1
    rows = trainer.rows()
    found = collect(trainer, rows)
    return ExaminedRun(config, trainer, rows, clock, start, found)
