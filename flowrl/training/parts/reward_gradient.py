"""Rewards that are differentiated through the image: which can be, and their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.abilities import differentiable
from flowrl.core.devices import on_host
from flowrl.core.errors import ConfigError, RewardError
from flowrl.core.part import Part
from flowrl.core.types import LossInput, RewardBatch
from flowrl.evaluation.reward_call import call_reward, own_batch
from flowrl.evaluation.reward_guard import guarded
from flowrl.training.learn import CallRows
from flowrl.training.rollout import prompted
from flowrl.training.run import Prepared, Run

SHIPPED = "soft_shapes; aesthetic and hpsv2 with gradient: true"
"""Rewards of flowrl that can be differentiated, for messages."""


class RewardGradient(Part):
    """The rewards of the images that the likelihood makes, with their gradient."""

    name = "reward gradient"
    rank = 60
    when = ("needs.reward",)
    fsdp = "a loss that follows the reward's gradient, whose images may take different steps,"
    context = "a loss that follows the reward's gradient"

    def begin(self, prepared: Prepared) -> None:
        """Refuse rewards that have no gradient."""
        check_differentiable(prepared.config, prepared.rewards)

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Ask the rewards about the images of the rows."""
        images = rows.now.images
        if images is None:
            return data
        local = rows.local
        group = local.streams.group[on_host(rows.batch.node)]
        seen = prompted(run, images, group, [local.rows[g] for g in group.tolist()])
        weights = run.config.reward_weights
        values = scored(run.rewards, weights, seen, f"iteration {run.iteration}")
        return data._replace(reward=summed(values, weights), rewards=values)


def check_differentiable(config: Config, rewards: dict[str, Any]) -> None:
    """Raise ConfigError unless every reward that counts has a gradient, and their values reach the
    loss as they are: without a transform, added by weight."""
    # a reward of weight 0 is only watched, and needs no gradient
    for name, call in config.rewards.items():
        if not config.reward_weights[name]:
            continue
        if not differentiable(rewards[name]):
            raise ConfigError(
                f"rewards.{name}: {call.fn} cannot be differentiated, but loss {config.loss.fn} "
                "follows the reward's gradient through the image. Take one that says "
                f"`differentiable = True` (of those that ship: {SHIPPED}), or set its weight to 0, "
                "so that it is only watched"
            )
        if call.transform:
            raise ConfigError(
                f"rewards.{name}.transform: loss {config.loss.fn} differentiates the reward "
                "itself; leave the transform out"
            )
    # only a weighted sum leaves the rewards' values, and with them the gradient, as they are
    if config.aggregate.fn != "weighted_sum":
        raise ConfigError(
            f"aggregate: {config.aggregate.fn} makes advantages, but loss {config.loss.fn} "
            "differentiates rewards, which are added by weight; leave the section out"
        )


def scored(
    rewards: dict[str, Any], weights: dict[str, float], batch: RewardBatch, where: str
) -> dict[str, Tensor]:
    """Ask the rewards that count about images [B, 3, H, W] -> {name: [B]}, with the gradient. Each
    gets a batch of its own. Raises RewardError that names one which fails or has no gradient."""
    found = {}
    for name, weight in weights.items():
        if not weight:
            continue
        said, own = f"{where}: reward {name!r}", own_batch(batch)
        with guarded(name, said):
            values = call_reward(rewards[name], own)
        found[name] = _with_gradient(values, batch.images, said)
    return found


def summed(values: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Add what rewards said, {name: [B]}, by weight -> [B]."""
    return torch.stack([weights[name] * value for name, value in values.items()]).sum(0)


def _with_gradient(values: Any, images: Tensor, said: str) -> Tensor:
    """Return values [B] if they are differentiable. Raises RewardError."""
    if not isinstance(values, Tensor) or values.shape != (len(images),):
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise RewardError(f"{said}: expected a tensor [{len(images)}], got {shape}")
    if images.requires_grad and not values.requires_grad:
        raise RewardError(
            f"{said} says that it is differentiable, but its values have no gradient: it detaches "
            "them, rounds the images or leaves torch"
        )
    return values.to(images.device)
