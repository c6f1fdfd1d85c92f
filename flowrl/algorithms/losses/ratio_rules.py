"""Other rules for the ratio: which rows have a gradient, and how large. Unreduced, one value per
decision.

They were made for texts, whose ratios are those of whole words. A log-prob here is a mean over
latent dimensions, so its ratios are far closer to 1: clip ranges of the papers (0.2 and more) never
act, and every range is an argument without a default. 1e-4 to 1e-3 per step is a place to start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import (
    check_clip,
    check_transition,
    ratio_metrics,
    segment_mean,
)
from flowrl.algorithms.losses._groups import check_positive
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import wide
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]


@needs("old_log_prob")
def one_sided(
    data: LossInput, *, clip_low: float, clip_high: float, max_advantage: float = 5.0
) -> Loss:
    """Return ``-A log r`` [B] and metrics [B], without a gradient for rows that have moved far
    enough.

    REC-OneSide-NoIS (2509.24203): plain policy gradient without an importance weight; the mask
    keeps A > 0 with r <= 1 + clip_high and A < 0 with r >= 1 - clip_low. The paper finds that
    clipping, not the importance weight, makes off-policy steps stable. `segment` and metrics as in
    `ppo_clip`.

    Raises: ConfigError for a clip range that is not positive.
    """
    check_clip("one_sided", clip_low, clip_high, max_advantage)
    log_ratio, share, a = _parts(data, max_advantage)
    ratio = log_ratio.detach().exp()
    stopped = _outward(ratio, a, clip_low, clip_high)
    return -a * log_ratio * ~stopped * share, ratio_metrics(log_ratio.detach(), stopped)


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
    log_ratio, share, a = _parts(data, max_advantage)
    ratio = log_ratio.exp()
    kept = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -scale * a * kept * share
    return loss, ratio_metrics(log_ratio.detach(), (kept != ratio).detach())


@needs("old_log_prob")
def opmd(data: LossInput, *, tau: float, max_advantage: float = 5.0) -> Loss:
    """Return ``-A log r + tau / 2 (log r)^2`` [B] and metrics [B].

    OPMD as in 2509.24203: a pull back to the policy that sampled in place of clipping. Rows stand
    still at ``log r = A / tau``. **Differs:** rows of advantage 0 are counted but not computed, so
    nothing pulls them back. `segment` and metrics as in `ppo_clip`; clip_frac is 0.

    Raises: ConfigError unless tau > 0 and max_advantage > 0.
    """
    check_positive("opmd", tau=tau, max_advantage=max_advantage)
    log_ratio, share, a = _parts(data, max_advantage)
    loss = -a * log_ratio + tau / 2 * log_ratio.square()
    return loss * share, ratio_metrics(log_ratio.detach(), torch.zeros_like(a, dtype=torch.bool))


@needs("old_log_prob", "zero_advantage")
def ratio_regression(data: LossInput, *, scale: float, max_advantage: float = 5.0) -> Loss:
    """Return ``(log r / scale - A)^2`` [B] and metrics [B]: regress the advantage on the log-ratio.

    Reg-GRPO of DeepVideo-R1 (2506.07464) in the form of REBEL (2404.16767): the minimum is at
    ``log r = scale A``. **Differs:** Reg-GRPO standardises log r within the prompt's group, which
    is `group_regression`; here `scale` is given. Its penalty is the `kl` section. `segment` and
    metrics as in `ppo_clip`; clip_frac is 0.

    Raises: ConfigError unless scale > 0 and max_advantage > 0.
    """
    check_positive("ratio_regression", scale=scale, max_advantage=max_advantage)
    log_ratio, share, a = _parts(data, max_advantage)
    loss = (log_ratio / scale - a).square()
    return loss * share, ratio_metrics(log_ratio.detach(), torch.zeros_like(a, dtype=torch.bool))


@needs("old_log_prob")
def asymmetric_ratio(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    cap: float = 3.0,
    max_advantage: float = 5.0,
) -> Loss:
    """Return a surrogate [B] whose weight for good draws is the inverse ratio, and metrics [B].

    ASPO (2510.06062), its code: the gradient of ``log_prob`` is ``-A w``. A > 0: ``w = 1 / r``, so
    that what has become likely already is not pushed further with growing force; 0 above
    1 + clip_high. A <= 0: ``w = r``; 0 below 1 - clip_low. w is at most `cap`. The value is
    ``-A w``, so its number is no objective. `segment` and metrics as in `ppo_clip`.

    Raises: ConfigError for a clip range that is not positive, or a cap of 1 or less.
    """
    check_clip("asymmetric_ratio", clip_low, clip_high, max_advantage)
    if not cap > 1:
        raise ConfigError(f"asymmetric_ratio: expected cap > 1, got {cap}")
    log_ratio, share, a = _parts(data, max_advantage)
    ratio = log_ratio.detach().exp()
    stopped = _outward(ratio, a, clip_low, clip_high)
    weight = torch.where(a > 0, 1 / ratio, ratio).clamp_max(cap)
    # the value is -a weight; only log_ratio has a gradient
    moving = 1 + log_ratio - log_ratio.detach()
    kept = torch.where(stopped, weight, weight * moving)
    return -a * kept * share, ratio_metrics(log_ratio.detach(), stopped)


@needs("old_log_prob")
def kept_gradient(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    keep_low: float,
    keep_high: float,
    max_advantage: float = 5.0,
) -> Loss:
    """Return a surrogate [B] that keeps a share of the gradient where PPO has none, and metrics
    [B].

    CE-GPPO (2509.20712): the gradient of ``log_prob`` is ``-A w``. Inside the range ``w = r``;
    above 1 + clip_high with A > 0 it is ``keep_high (1 + clip_high)``, below 1 - clip_low with
    A < 0 ``keep_low (1 - clip_low)``. Shares of 0 are `ppo_clip`. Reconstruction: read second hand.
    `segment` and metrics as in `ppo_clip`; clip_frac is where a share is kept.

    Raises: ConfigError for a clip range that is not positive, or a negative share.
    """
    check_clip("kept_gradient", clip_low, clip_high, max_advantage)
    if min(keep_low, keep_high) < 0:
        raise ConfigError(f"kept_gradient: expected shares >= 0, got {keep_low=}, {keep_high=}")
    log_ratio, share, a = _parts(data, max_advantage)
    ratio = log_ratio.exp()
    high, low = (a > 0) & (ratio > 1 + clip_high), (a < 0) & (ratio < 1 - clip_low)
    # the value of the end of the range, with a share of the gradient of log r
    moving = log_ratio - log_ratio.detach()
    above = (1 + clip_high) * (1 + keep_high * moving)
    below = (1 - clip_low) * (1 + keep_low * moving)
    kept = torch.where(high, above, torch.where(low, below, ratio))
    return -a * kept * share, ratio_metrics(log_ratio.detach(), (high | low).detach())


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
    log_ratio, share, a = _parts(data, max_advantage)
    gap = (data.now.mean.detach() - data.old_mean).square().flatten(1).mean(1)
    return _masked(log_ratio, share, a, gap / (2 * data.now.std.square()), most)


@needs("old_log_prob", "old")
def velocity_mask(data: LossInput, *, most: float, max_advantage: float = 5.0) -> Loss:
    """Return `divergence_mask` with ``d = mean((v - v_old)^2)`` [B], the distance of velocities.

    Flow-DPPO's other form, as in Flow-Factory: all noise levels count alike. From the second
    optimizer step of an iteration on, the old velocity is one network call more.

    Raises: ConfigError unless most > 0 and max_advantage > 0, or for a likelihood without a
    velocity.
    """
    check_positive("velocity_mask", most=most, max_advantage=max_advantage)
    now, old = data.now.v, data.under["old"].v
    if now is None or old is None:
        raise ConfigError("velocity_mask: the likelihood has no velocity; take reverse")
    log_ratio, share, a = _parts(data, max_advantage)
    divergence = (wide(now.detach()) - wide(old.detach())).square().flatten(1).mean(1)
    return _masked(log_ratio, share, a, divergence, most)


def _masked(
    log_ratio: Tensor, share: Tensor | float, a: Tensor, divergence: Tensor, most: float
) -> Loss:
    """Return ``-a r`` [B] without a gradient where the divergence is reached and r moves outward,
    and metrics."""
    ratio = log_ratio.exp()
    outward = ((ratio > 1) & (a > 0)) | ((ratio < 1) & (a < 0))
    stopped = outward.detach() & (divergence >= most)
    loss = -a * torch.where(stopped, ratio.detach(), ratio)
    metrics = ratio_metrics(log_ratio.detach(), stopped)
    return loss * share, metrics | {"divergence": divergence}


def _parts(data: LossInput, max_advantage: float) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return the log-ratio of each row's action [B], the row's share of it, and the advantage."""
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    return log_ratio, share, data.batch.advantage.detach().clamp(-max_advantage, max_advantage)


def _outward(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """Say which rows have left the range on the side that their advantage pushes them to."""
    return ((a > 0) & (ratio > 1 + high)) | ((a <= 0) & (ratio < 1 - low))
