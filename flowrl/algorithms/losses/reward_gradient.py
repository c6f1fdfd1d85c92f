"""Losses that are the reward itself, differentiated through the image. Unreduced: one value per
row; only the training loop divides."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("reward", "zero_advantage")
def reward_ascent(
    data: LossInput, *, scale: float = 1.0, enough: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``scale max(enough - r, 0)`` [B], or ``-scale r`` without `enough`, and metrics
    [B].

    r is the reward of the images that the likelihood made, `draft` and its like, weighted and
    added as `rewards` says; advantages play no part. ReFL's code has scale 1e-3 and enough 2,
    AlignProp's 0.01 and the distance of r to 10, TRL's port ``10 - r``, whose gradient is that of
    -r. An image that was not scored has loss 0.

    Metrics: `image_reward`, r, unrounded; `satisfied`, 1 where r is enough and nothing is learned.

    Raises: ConfigError for a scale that is not above 0, or a likelihood that makes no images.
    """
    if not scale > 0:
        raise ConfigError(f"reward_ascent: expected scale > 0, got {scale}")
    if data.reward is None:
        raise ConfigError(
            "reward_ascent: the likelihood makes no images; take draft, draft_lv, align_prop, "
            "align_prop_each or refl"
        )
    scored = ~data.reward.isnan()
    reward = data.reward.nan_to_num()
    gap = -reward if enough is None else (enough - reward).relu()
    loss = torch.where(scored, scale * gap, 0.0)
    seen = reward.detach()
    satisfied = torch.zeros_like(seen) if enough is None else (seen >= enough).to(seen)
    return loss, {"image_reward": seen, "satisfied": satisfied}
