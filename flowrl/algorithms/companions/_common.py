"""What companions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of
from flowrl.algorithms.losses._groups import check_positive
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import wide
from flowrl.core.types import Batch, Eval, FlowModel, Rollout

Betas = tuple[float, float]


class Companion:
    """What companions share: AdamW's options, when and how often it learns, and a model call.

    It learns in the first `iterations` of a run, null = in all, with `updates` optimizer steps
    each. In the first `alone` the policy stands still, so that there is something to follow from
    its first step on. Both are ours.

    Raises: ConfigError for a learning rate or updates that are not positive, numbers below 0,
    betas outside [0, 1), or a companion that does not learn in all iterations in which it is alone.
    """

    looks_at: tuple[str, ...] = ()  # other weights: "ref", "slow"
    begin = ""  # weights that it begins with, as `train.start`; empty: the model's own

    def __init__(
        self,
        name: str,
        lr: float,
        betas: Betas,
        weight_decay: float,
        updates: int,
        alone: int = 0,
        iterations: int | None = None,
    ) -> None:
        check_positive(name, lr=lr, updates=updates)
        if weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"{name}: expected weight_decay >= 0 and betas from 0 to below 1, got "
                f"{weight_decay=}, {betas=}"
            )
        if alone < 0 or (iterations is not None and iterations < alone):
            raise ConfigError(
                f"{name}: expected alone >= 0, and iterations to be null (it learns throughout) or "
                f"at least {max(alone, 0)}, since it learns wherever it is alone; got {alone=}, "
                f"{iterations=}"
            )
        self.name, self.updates = name, updates
        self.alone, self.iterations = alone, iterations
        self.adamw: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay}

    def learns(self, iteration: int) -> bool:
        """Say whether it learns in an iteration, counted from 0."""
        return self.iterations is None or iteration < self.iterations

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy learns in an iteration, counted from 0."""
        return iteration >= self.alone

    def rows(self, rollout: Rollout, nodes: Tensor, rng: torch.Generator) -> Tensor:
        """Return those of the steps, by the nodes [N] that they ended in, that it learns from."""
        return nodes

    def evaluate(self, model: FlowModel, batch: Batch) -> Eval:
        """Ask the model about a batch -> Eval with mean = v."""
        v = wide(model.velocity(batch.x, batch.sigma, batch.cond))
        zero = torch.zeros(len(v), dtype=torch.float64, device=v.device)
        return Eval(zero, v, zero, v)

    def slow_decay(self, updates: int) -> float:
        """Return how slowly a copy of it follows, after so many updates; without use here."""
        return 0.0


def mean_square(values: Tensor) -> Tensor:
    """Return the mean square [B] of values [B, *], float64."""
    return values.double().square().flatten(1).mean(1)


def rows_of(
    rollout: Rollout,
    advantage: Tensor,
    nodes: Tensor,
    x: Tensor,
    level: Tensor,
    target: Tensor,
    log_ratio: Tensor,
) -> Batch:
    """Put rows [B] together for one network call."""
    zero = torch.zeros_like(level)
    return Batch(
        x=x,
        sigma=level,
        sigma_next=level,
        noise_scale=zero,
        target=target,
        old_log_prob=log_ratio,
        advantage=advantage[nodes],
        node=nodes,
        parent=torch.arange(len(nodes), device=nodes.device),
        step=rollout.tree.step[rollout.tree.parent[nodes]],
        cond=cond_of(rollout, nodes),
    )
