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
    -r. An image that was not scored has loss 0. Where a row's step goes back towards noise
    (likelihood `direct_align`), the loss is ``scale (enough + r)`` while r is not enough: such a
    step changes the image the other way, so its velocity learns the same.

    Metrics: `image_reward`, r, unrounded; `satisfied`, 1 where r is enough and nothing is learned.

    Raises: ConfigError for a scale that is not above 0, or a likelihood that makes no images.
    """
    if not scale > 0:
        raise ConfigError(f"reward_ascent: expected scale > 0, got {scale}")
    if data.reward is None:
        raise ConfigError(
            "reward_ascent: the likelihood makes no images; take draft, draft_lv, align_prop, "
            "align_prop_each, refl or direct_align"
        )
    scored = ~data.reward.isnan()
    seen = data.reward.nan_to_num().detach()
    back = data.batch.sigma_next > data.batch.sigma
    gap = torch.where(back, 1.0, -1.0).to(seen) * data.reward.nan_to_num()
    satisfied = torch.zeros_like(seen)
    if enough is not None:
        satisfied = (seen >= enough).to(seen)
        gap = (enough + gap) * (1 - satisfied)
    loss = torch.where(scored, scale * gap, 0.0)
    return loss, {"image_reward": seen, "satisfied": satisfied}


@needs("reward", "zero_advantage")
def relative_ascent(
    data: LossInput,
    *,
    wanted: str = "wanted",
    unwanted: str = "unwanted",
    denoise_low: float = 0.1,
    denoise_high: float = 0.25,
    inverse_low: float = 0.3,
    inverse_high: float = 0.01,
    enough: float | None = 0.7,
    scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``scale max(enough - r, 0)`` [B], or ``-scale r`` without `enough`, for the difference
    of two rewards: ``r = (1 + k) wanted - unwanted`` of a step that denoises, ``r = (1 + k)
    unwanted - wanted`` of one back towards noise; and metrics [B].

    The semantic-relative preference of SRPO (2509.06942; Tencent-Hunyuan/SRPO 81e5898). Both
    rewards are one scorer's, of the prompt with a wanted and with an unwanted word in front. What
    the scorer likes anyway, such as strong colours, is in both and cancels; a step back towards
    noise is pushed the other way, which unlearns what a reward pays for by itself. k grows linearly
    over the interval of likelihood `direct_align`, from `denoise_low` at its cleaner end to
    `denoise_high`, and likewise for the way back. Weights of the two rewards play no part here;
    1 and -1 make the logged reward their difference.

    Args: wanted, unwanted: names of rewards. enough: 0.7 as published.

    **Differs:** the paper has ``(1 - k) b + k a`` as well, which its code calls less stable.

    Metrics: `image_reward`, r; `satisfied`, 1 where r is enough and nothing is learned; `relative`,
    wanted - unwanted.

    Raises: ConfigError for a scale that is not above 0, names of no rewards that count, or another
    likelihood than `direct_align`.
    """
    if not scale > 0:
        raise ConfigError(f"relative_ascent: expected scale > 0, got {scale}")
    if data.reward is None or data.batch.query is None:
        raise ConfigError("relative_ascent: needs likelihood direct_align, which knows its sides")
    missing = [name for name in (wanted, unwanted) if name not in data.rewards]
    if missing or wanted == unwanted:
        raise ConfigError(
            f"relative_ascent: wanted={wanted!r} and unwanted={unwanted!r} must be two of the "
            f"rewards whose weight is not 0: {', '.join(sorted(data.rewards)) or 'there are none'}"
        )
    good, bad = data.rewards[wanted], data.rewards[unwanted]
    known = ~(good.isnan() | bad.isnan())
    good, bad = good.nan_to_num(), bad.nan_to_num()
    # how far the pair is stretched, by the level, and which way the step goes
    place = data.batch.query.to(good)
    forth = denoise_low + (denoise_high - denoise_low) * place
    back = inverse_low + (inverse_high - inverse_low) * place
    denoises = data.batch.sigma > data.batch.sigma_next
    reward = torch.where(denoises, (1 + forth) * good - bad, (1 + back) * bad - good)
    gap = -reward if enough is None else (enough - reward).relu()
    seen = reward.detach()
    satisfied = torch.zeros_like(seen) if enough is None else (seen >= enough).to(seen)
    metrics = {"image_reward": seen, "satisfied": satisfied, "relative": (good - bad).detach()}
    return torch.where(known, scale * gap, 0.0), metrics
