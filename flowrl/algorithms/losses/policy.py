"""Policy-gradient losses, unreduced: one value per decision. Only the training loop divides."""

from __future__ import annotations

from torch import Tensor

from flowrl.algorithms.losses._common import check_clip, ratio_metrics, segment_mean, surrogate
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("old_log_prob")
def ppo_clip(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    max_advantage: float = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` [B] and
    metrics [B].

    ``r = exp(log_prob - old_log_prob)``; A is the advantage within ±max_advantage. Source: PPO
    (1707.06347) eq. 7.

    segment [B] int64: decisions with equal ids move as one action (Chunk-GRPO, 2510.21583): r is
    the exp of the mean log-ratio of its members, and the action's loss is shared out evenly among
    them, so that it counts once whatever its size. A segment must lie within one call, with one
    advantage. **Differs:** the sum is divided by the number of decisions, not of chunks; with fixed
    chunks this is a constant factor.

    Metrics: ratio; clip_frac 1 where clipping stops the gradient; clip_high_frac the part of it
    above 1 + clip_high; approx_kl the k3 form ``r - 1 - log r`` of the logged ratio (Flow-GRPO logs
    k2, ``(log r)^2 / 2``; they agree to second order). Since r is per latent dimension, it is an
    indicator of policy change and not the KL in nats: a shift of the mean by m variances has the KL
    m / 2 per dimension and approx_kl of about ``m / (2 D) + m^2 / 8``.

    Raises: ConfigError for a clip range that is not positive.
    """
    check_clip("ppo_clip", clip_low, clip_high, max_advantage)
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    loss, stopped = surrogate(log_ratio, a, clip_low, clip_high)
    return loss * share, ratio_metrics(log_ratio.detach(), stopped)


@needs("zero_advantage")
def penalty_alone(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return 0 [B] whatever the advantages, and no metrics: the policy learns from the section `kl`
    alone.

    With penalty `data_velocity` that is supervised fine-tuning on real images, at the states and
    the cost of the method beside which it stands. Rewards are watched.
    """
    return 0 * data.now.log_prob, {}
