"""Policy-gradient losses, unreduced: one value per decision. Only the training loop divides."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import (
    Loss,
    check_clip,
    check_transition,
    clipped_action,
    masked,
    ratio_metrics,
    segment_mean,
    surrogate,
)
from flowrl.algorithms.losses._groups import check_positive
from flowrl.core.devices import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import per_sample, wide
from flowrl.core.types import LossInput


@needs("old_log_prob")
def ppo_clip(
    data: LossInput, *, clip_low: float, clip_high: float, max_advantage: float = 5.0
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


@needs("old_log_prob")
def clamped_ratio(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    scale: float = 1.0,
    max_advantage: float = 5.0,
) -> Loss:
    """Return ``-scale A clip(r, 1 - clip_low, 1 + clip_high)`` [B] and metrics [B].

    FIND (2407.19453), its code: scale 10, range 0.2. Without PPO's maximum a row outside the range
    has no gradient on either side, whatever its advantage. `segment` and metrics as in `ppo_clip`.

    Raises: ConfigError for a clip range or a scale that is not positive.
    """
    check_clip("clamped_ratio", clip_low, clip_high, max_advantage)
    check_positive("clamped_ratio", scale=scale)
    log_ratio, share, a = clipped_action(data, max_advantage)
    ratio = log_ratio.exp()
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -scale * a * kept * share
    return loss, ratio_metrics(log_ratio.detach(), (kept != ratio).detach())


@needs("old_log_prob", "old_mean")
def divergence_mask(data: LossInput, *, most: float, max_advantage: float = 5.0) -> Loss:
    """Return ``-A r`` [B], without a gradient where the policy has moved too far and moves on, and
    metrics [B].

    Flow-DPPO (2606.11025), as in Flow-Factory: ``d = mean((mean - old_mean)^2) / (2 std^2)`` [B],
    the KL of the step per latent dimension. A row is stopped if ``d >= most`` and its gradient
    leads outward: r > 1 with A > 0, or r < 1 with A < 0. most: 1e-6 there. Unlike a range for r it
    does not depend on the size of the latent or on the draw's own noise. `velocity_mask` has the
    other published distance.

    Metrics: those of `ppo_clip`; divergence d.

    Raises: ConfigError unless most > 0 and max_advantage > 0, without the old means, or for a
    likelihood without a std.
    """
    check_positive("divergence_mask", most=most, max_advantage=max_advantage)
    if data.old_mean is None:
        raise ConfigError("divergence_mask: needs the transition means of the sampling policy")
    check_transition("divergence_mask", data)
    log_ratio, share, a = clipped_action(data, max_advantage)
    gap = (data.now.mean.detach() - data.old_mean).square().flatten(1).mean(1)
    return masked(log_ratio, share, a, gap / (2 * data.now.std.square()), most)


@needs("old_log_prob", "old_mean")
def guard(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    max_advantage: float = 5.0,
    bias: Literal["sample", "batch"] = "sample",
    divide_by_delta: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate of ``r = exp((log_prob - old_log_prob + b) std)``, over delta,
    [B] and metrics [B].

    ``b = mean((mean - old_mean)^2) / (2 std^2)`` over latent dimensions, ``delta = sigma -
    sigma_next``; mean and old_mean [B, *] are those of the transition, std [B] its std above 0.
    GRPO-Guard (2510.22319) and its code, whose clip ranges are 2e-6 to 4e-6. The gradient flows
    through b as well: log r is then linear in the mean.

    **Differs:** the code averages over the whole micro-batch, so that all its rows share one b;
    that is bias "batch", and "sample" is the paper. A micro-batch of the code has one noise level,
    one of flowrl may have several. Flow-Factory has the same ratio without the division by delta
    (`divide_by_delta` off).

    Metrics as in `ppo_clip`, of this ratio: approx_kl is half its squared logarithm, which is no
    KL.

    Raises: ConfigError for a clip range that is not positive, another `bias`, a segment, or a
    likelihood without a std, or without steps to divide by.
    """
    check_clip("guard", clip_low, clip_high, max_advantage)
    if bias not in ("sample", "batch"):
        raise ConfigError(f'guard: bias must be "sample" or "batch", got {bias!r}')
    if data.old_mean is None:
        raise ConfigError("guard: needs the transition means of the sampling policy, got none")
    if data.segment is not None:
        raise ConfigError("guard: its ratio is that of a single step; leave out `segment`")
    check_transition("guard", data)
    delta = data.batch.sigma - data.batch.sigma_next
    if divide_by_delta:
        still = ConfigError(
            "guard: divides by what a step takes off the noise level, and this likelihood takes no "
            "steps; take likelihood reverse, or loss ppo_clip"
        )
        refuse_if((delta == 0).any(), lambda: still)
    std = data.now.std
    # the log-ratio without its bias, on the scale of one std
    gap = (data.now.mean - data.old_mean.detach()).square().flatten(1).mean(1)
    b = gap / (2 * std.square())
    plain = data.now.log_prob - data.old_log_prob.detach()
    log_ratio = (plain + (b.mean() if bias == "batch" else b)) * std
    # clipped as in PPO
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    loss, stopped = surrogate(log_ratio, a, clip_low, clip_high)
    if divide_by_delta:
        loss = loss / delta
    return loss, ratio_metrics(log_ratio.detach(), stopped)


@needs("old_log_prob", "best", "zero_advantage")
def dynamic_clip(
    data: LossInput,
    *,
    clip_min: float,
    clip_max: float,
    eta: float,
    max_advantage: float = 5.0,
    sft: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``max(-A r, -A clip(r, 1 - e, 1 + e)) + sft sigmoid(best_advantage) mean((v -
    best_v)^2)`` [B], metrics [B].

    ``e = clip_min + (clip_max - clip_min) sigmoid(eta A)``, A the advantage within ±max_advantage:
    good draws may move further (eta > 0). ``best_v = (x - best_x0) / sigma``, a constant, leads
    straight from the state x [B, *] at sigma [B] to the latent best_x0 [B, *] of the best leaf
    below it, whose advantage is best_advantage [B]; v [B, *] has a gradient. eta 0 and sft 0 is
    `ppo_clip` with the range ``(clip_min + clip_max) / 2`` on both sides.

    Reconstruction, see above. Siblings repeat the pull of their state, and a `segment` (as in
    `ppo_clip`) does not share it out. Metrics: those of `ppo_clip`; clip_range e; sft the pull.

    Raises: ConfigError unless 0 < clip_min <= clip_max <= 1, max_advantage > 0 and sft >= 0.
    """
    _check_dynamic(clip_min, clip_max, max_advantage, sft)
    # bounds that follow the advantage
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    bound = clip_min + (clip_max - clip_min) * (eta * a).sigmoid()
    loss, stopped = surrogate(log_ratio, a, bound, bound)
    # the pull towards the best leaf
    pull = _towards_best(data, sft) if sft else torch.zeros_like(loss)
    metrics = ratio_metrics(log_ratio.detach(), stopped)
    metrics |= {"clip_range": bound, "sft": pull.detach()}
    return loss * share + pull, metrics


def _towards_best(data: LossInput, sft: float) -> Tensor:
    """Return `sft` times the sigmoid of the best leaf's advantage times the mean squared distance
    of v from the velocity that leads straight to it, [B]."""
    if data.now.v is None or data.best_x0 is None or data.best_advantage is None:
        raise ConfigError("dynamic_clip: sft needs the velocity and the best leaf, got none")
    v = wide(data.now.v)
    x, best_x0, sigma = (
        part.to(v.dtype) for part in (data.batch.x, data.best_x0, data.batch.sigma)
    )
    path = (x - best_x0) / per_sample(sigma, x)
    distance = (v - path.detach()).square().flatten(1).mean(1)
    return sft * data.best_advantage.detach().sigmoid() * distance


def _check_dynamic(clip_min: float, clip_max: float, max_advantage: float, sft: float) -> None:
    if not (0 < clip_min <= clip_max <= 1 and max_advantage > 0 and sft >= 0):
        raise ConfigError(
            "dynamic_clip needs 0 < clip_min <= clip_max <= 1, max_advantage > 0 and sft >= 0, "
            f"got clip_min={clip_min}, "
            f"clip_max={clip_max}, max_advantage={max_advantage}, sft={sft}"
        )


@needs("old_log_prob", "zero_advantage")
def bound_gradient(
    data: LossInput,
    *,
    form: Literal["epg", "pepg", "par"] = "pepg",
    ratio: bool = True,
    advantage_scale: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a surrogate [B] whose gradient is a policy gradient on the bound l, and metrics [B].

    ``D = l - l_old`` and ``rho = exp(D)``, both without a gradient, rho 1 without `ratio`; A the
    advantage times advantage_scale. epg: ``-rho A l``. pepg: ``-rho (A - D) l``, which also pulls
    back to the old policy. par: ``rho (A - (l - l_old))^2 / 2``, a regression of the log-ratio to
    A, with the gradient of pepg. Source: EPG, PEPG and PAR (2602.04663), their code: A is
    ``0.1 (r - mean)`` without a std, which is credit `mean_centred` and the scale 0.1.

    **Differs:** in the code one number is the scale of A and the weight of the penalty, so that
    without a penalty the scale is another one; here these are two.

    Rows of advantage 0 are pulled back as well.

    Metrics: `log_ratio`, D; `error`, -l.

    Raises: ConfigError for a scale that is not above 0.
    """
    if not advantage_scale > 0:
        raise ConfigError(f"bound_gradient: expected advantage_scale > 0, got {advantage_scale}")
    bound, old = data.now.log_prob, data.old_log_prob.detach()
    gap = bound.detach() - old
    rho = gap.exp() if ratio else torch.ones_like(gap)
    a = advantage_scale * data.batch.advantage.detach()
    if form == "epg":
        loss = -rho * a * bound
    elif form == "pepg":
        loss = -rho * (a - gap) * bound
    else:
        loss = rho * (a - (bound - old)).square() / 2
    return loss, {"log_ratio": gap, "error": -bound.detach()}
