"""Policy-gradient losses, unreduced: one value per decision. Only the training loop divides."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.errors import ConfigError


def ppo_clip(
    log_prob: Tensor,
    old_log_prob: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_weight: float = 5.0,
    segment: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` [B] and metrics [B].

    ``r = exp(log_prob - old_log_prob)``; A is the weight within ±max_weight. Source: PPO (1707.06347) eq. 7.

    segment [B] int64: decisions with equal ids move as one action (Chunk-GRPO, 2510.21583): r is the exp of the mean
    log-ratio of its members, and the action's loss is shared out evenly among them, so that it counts once whatever
    its size. A segment must lie within one call, with one weight. **Differs:** the sum is divided by the number of
    decisions, not of chunks; with fixed chunks this is a constant factor.

    Metrics: ratio; clip_frac 1 where clipping stops the gradient; clip_high_frac the part of it above 1 + clip_high;
    approx_kl the k3 form ``r - 1 - log r`` of the logged ratio (Flow-GRPO logs k2, ``(log r)^2 / 2``; they agree to
    second order). Since r is per latent dimension, it is an indicator of policy change and not the KL in nats: a shift
    of the mean by m variances has the KL m / 2 per dimension and approx_kl of about ``m / (2 D) + m^2 / 8``.

    Raises: ConfigError for a clip range that is not positive.
    """
    _check(clip_low, clip_high, max_weight)
    log_ratio = log_prob - old_log_prob.detach()
    share: Tensor | float = 1.0
    if segment is not None:
        log_ratio, share = _segment_mean(log_ratio, segment)
    ratio = log_ratio.exp()
    a = weight.detach().clamp(-max_weight, max_weight)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-a * ratio, -a * clipped) * share
    stopped = (-a * clipped > -a * ratio).detach()
    return loss, _metrics(log_ratio.detach(), stopped)


def _metrics(log_ratio: Tensor, stopped: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": log_ratio.exp(),
        "clip_frac": stopped.to(log_ratio.dtype),
        "clip_high_frac": (stopped & (log_ratio > 0)).to(log_ratio.dtype),
        "approx_kl": torch.expm1(log_ratio) - log_ratio,  # expm1: r - 1 would lose all digits near 1
    }


def _segment_mean(values: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value's segment mean [B], differentiable, and one over the segment's size [B]."""
    ids, index = torch.unique(segment, return_inverse=True)
    zeros = values.new_zeros(len(ids))
    share = 1 / zeros.index_add(0, index, torch.ones_like(values))
    return (zeros.index_add(0, index, values) * share)[index], share[index]


def _check(clip_low: float, clip_high: float, max_weight: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0 and max_weight > 0):
        raise ConfigError(
            f"ppo_clip needs 0 < clip_low <= 1, clip_high > 0 and max_weight > 0, got clip_low={clip_low}, "
            f"clip_high={clip_high}, max_weight={max_weight}"
        )
