"""Which prompts are trained, by what the rewards said of their images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import SelectInput

NEAR = 1e-6  # rewards are float32: a range of 0.3 may come out as 0.29999998


def reward_range(data: SelectInput, *, low: float, high: float = math.inf) -> Tensor:
    """Train only prompts whose images differ enough and not too much: the largest reward less the
    smallest one is from `low` to `high` -> factor [V], 0 or 1.

    The reward is the weighted sum of those that count, after their transforms, over all scored
    leaves of the prompt. A prompt with no scored leaf is left out; one leaf alone has the range 0.
    In a rehearsal, where no reward is known, all prompts are kept.

    Qwen-Image-2.0-RL (2606.27608): prompts are chosen by the range of rewards in their group.
    Reconstruction: the two thresholds were not found, nor whether prompts are looked at once before
    training or, as here, whenever they are drawn.

    Raises: ConfigError unless 0 <= low < high.
    """
    if not 0 <= low < high:
        raise ConfigError(
            f"select reward_range: expected 0 <= low < high, got {low=}, {high=}; a reward that is "
            "0 or 1 has the ranges 0 and 1 alone"
        )
    tree, leaf = data.rollout.tree, data.rollout.leaf
    if data.reward is None:
        return torch.ones_like(tree.std)
    group = torch.unique(tree.group, return_inverse=True)[1]
    value, mine = data.reward.double().to(leaf.device), group[leaf]
    most = value.new_full((int(group.max()) + 1,), -torch.inf)
    # without any scored leaf both stay infinite, and the range is below every `low`
    top = most.scatter_reduce(0, mine, value.nan_to_num(nan=-torch.inf), "amax")
    bottom = (-most).scatter_reduce(0, mine, value.nan_to_num(nan=torch.inf), "amin")
    span = top - bottom
    return ((span >= low - NEAR) & (span <= high + NEAR))[group].float()
