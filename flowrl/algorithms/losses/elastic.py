"""Clip ranges that follow the signal or the density of a draw, and ranges for steps beside those
for images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import (
    check_clip,
    probability_bounds,
    ratio_metrics,
    segment_mean,
    surrogate,
)
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import refuse_if
from flowrl.core.needs import needs
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]


@needs("old_log_prob", "reward_variance")
def elastic_clip(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    by_advantage: float = 0.5,
    by_variance: float = 0.5,
    at: float = 1.0,
    reward_range: float = 1.0,
    max_advantage: float = 5.0,
) -> Loss:
    """Return `ppo_clip`'s surrogate [B] with the upper bound ``clip_high (1 + by_advantage
    min(|A| / at, 1)) (1 + by_variance 4 var / range^2)``, and metrics [B]; var is the variance of
    the rewards of the row's prompt.

    ETR (2601.03723): strong signals and prompts of medium difficulty, whose rewards differ most,
    may move the policy further; the lower bound stays. Reconstruction, the abstract is all that we
    have of the rule: both factors, and every default. by_variance 0 leaves the first half.

    Metrics: those of `ppo_clip`; clip_range, the upper bound.

    Raises: ConfigError for a clip range that is not positive, negative factors, or `at` or
    `reward_range` not above 0.
    """
    check_clip("elastic_clip", clip_low, clip_high, max_advantage)
    if not (min(by_advantage, by_variance) >= 0 and min(at, reward_range) > 0):
        raise ConfigError(
            "elastic_clip: expected by_advantage and by_variance >= 0, at and reward_range > 0, "
            f"got {by_advantage=}, {by_variance=}, {at=}, {reward_range=}"
        )
    if data.reward_variance is None:
        raise ConfigError("elastic_clip: needs the variance of each prompt's rewards, got none")
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    spread = 4 * data.reward_variance.to(a) / reward_range**2
    high = clip_high * (1 + by_advantage * (a.abs() / at).clamp_max(1)) * (1 + by_variance * spread)
    low = torch.full_like(high, clip_low)
    loss, stopped = surrogate(log_ratio, a, low, high)
    return loss * share, ratio_metrics(log_ratio.detach(), stopped) | {"clip_range": high}


@needs("old_log_prob")
def hybrid_ratio(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    image_low: float,
    image_high: float,
    mix: float = 0.5,
    max_advantage: float = 5.0,
) -> Loss:
    """Return ``mix`` times `ppo_clip`'s surrogate of each step's own ratio plus ``1 - mix`` times
    that of the image's [B], and metrics [B] of the steps' ratios.

    The image's ratio is the exp of the mean log-ratio over its segment, as in GSPO; take `segment:
    {fn: fixed, sizes: [number of trained steps]}`. DHPO (2601.05607), its averaged form, each
    branch in a trust region of its own. Reconstruction: known by its abstract and a survey; the
    form that mixes by entropy has no counterpart, since the entropy of a step is a constant.

    Raises: ConfigError for a clip range that is not positive, mix outside [0, 1], or without a
    segment section.
    """
    check_clip("hybrid_ratio", clip_low, clip_high, max_advantage)
    check_clip("hybrid_ratio: image", image_low, image_high, max_advantage)
    if not 0 <= mix <= 1 or data.segment is None:
        raise ConfigError(
            "hybrid_ratio: expected mix from 0 to 1 and a segment section, such as segment: {fn: "
            "fixed, sizes: [4]} for 4 trained steps; got "
            f"{mix=} and "
            f"{'no' if data.segment is None else 'a'} segment"
        )
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    # log-ratio of each step [B]; `segment_mean` gives all steps of an image their mean
    own = data.now.log_prob - data.old_log_prob.detach()
    step, stopped = surrogate(own, a, clip_low, clip_high)
    image, stopped_image = surrogate(segment_mean(own, data.segment)[0], a, image_low, image_high)
    # the steps' ratios, as other losses report them
    metrics = ratio_metrics(own.detach(), stopped)
    metrics["image_clip_frac"] = stopped_image.to(a.dtype)
    return mix * step + (1 - mix) * image, metrics


@needs("old_log_prob")
def density_clip(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    cap: float = 10.0,
    max_advantage: float = 5.0,
) -> Loss:
    """Return `ppo_clip`'s surrogate [B] with the `probability_bounds` of each draw, and metrics
    [B]: unlikely draws may move further.

    DCPO (2509.02333): its text has ranges 0.16 and 0.2, its code 0.2 and 0.28. Where A < 0 the
    ratio counts as at most `cap` (its dual clip, 10 in the code). The bounds are exact, what stands
    for a probability is a **reconstruction**, an experiment: a draw of a continuous latent has a
    density and no probability. Of D numbers ``x_next = mean + std z`` the mean of z^2 has mean 1
    and variance 2 / D, so ``s = (1 - mean z^2) sqrt(D / 2)`` says by how many standard deviations
    the log-prob under the sampling weights is above its own mean, and ``q = sigmoid(s)``. `segment`
    as in `ppo_clip`, q is then of the mean over the segment.

    Metrics: those of `ppo_clip`; clip_range, the upper bound less 1; probability, q.

    Raises: ConfigError for a clip range that is not positive, a cap of 1 or less, or a likelihood
    without a std.
    """
    check_clip("density_clip", clip_low, clip_high, max_advantage)
    if not cap > 1:
        raise ConfigError(f"density_clip: expected cap > 1, got {cap}")
    std, old = data.now.std.detach().double(), data.old_log_prob.detach()
    wrong = ConfigError(
        "density_clip: asks how likely a draw was, and this likelihood draws nothing; take "
        "likelihood: {fn: reverse}"
    )
    refuse_if((std <= 0).any(), lambda: wrong)
    # how likely the draw was among all that could have been drawn there
    squares = -2 * (old + std.log() + math.log(2 * math.pi) / 2)
    standing = (1 - squares) * math.sqrt(data.batch.x[0].numel() / 2)
    q = segment_mean(standing, data.segment)[0].sigmoid()
    low, high = probability_bounds(q, clip_low, clip_high, most=max(cap, 10.0))
    # clipped there; what is bad and has become far likelier is no more than that
    log_ratio, share = segment_mean(data.now.log_prob - old, data.segment)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    loss, stopped = surrogate(log_ratio, a, 1 - low, high - 1)
    beyond = (a < 0) & (log_ratio.detach() > math.log(cap))
    loss = torch.where(beyond, -a * cap, loss)
    metrics = ratio_metrics(log_ratio.detach(), stopped | beyond)
    return loss * share, metrics | {"clip_range": high - 1, "probability": q}
