"""A reward that asks to be hacked: the more colour in an image, the better, whatever the prompt."""

from __future__ import annotations

from torch import Tensor

from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_metrics import saturation


def colour(batch: RewardBatch) -> Tensor:
    """Score images [L, 3, H, W] by their saturation -> [L] in [0, 1]."""
    return saturation(batch.images)
