"""Losses that were made for groups of texts: other rules for the ratio, regressions, and
preferences within a group. Unreduced, one value per row; only the training loop divides.

A log-prob here is a mean over latent dimensions, so its ratios are far closer to 1 than those of
words: clip ranges of the papers (0.2 and more) never act, and every range is an argument without a
default. 1e-4 to 1e-3 per step is a place to start.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.algorithms.losses._common import (
    Loss,
    check_clip,
    clipped_action,
    masked,
    numbered,
    ratio_metrics,
)
from flowrl.algorithms.losses._groups import (
    check_alike,
    check_positive,
    of_scored,
    total,
    whole_groups,
)
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import wide
from flowrl.core.types import LossInput


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
    log_ratio, share, a = clipped_action(data, max_advantage)
    ratio = log_ratio.detach().exp()
    stopped = _outward(ratio, a, clip_low, clip_high)
    return -a * log_ratio * ~stopped * share, ratio_metrics(log_ratio.detach(), stopped)


@needs("old_log_prob")
def opmd(data: LossInput, *, tau: float, max_advantage: float = 5.0) -> Loss:
    """Return ``-A log r + tau / 2 (log r)^2`` [B] and metrics [B].

    OPMD as in 2509.24203: a pull back to the policy that sampled in place of clipping. Rows stand
    still at ``log r = A / tau``. **Differs:** rows of advantage 0 are counted but not computed, so
    nothing pulls them back. `segment` and metrics as in `ppo_clip`; clip_frac is 0.

    Raises: ConfigError unless tau > 0 and max_advantage > 0.
    """
    check_positive("opmd", tau=tau, max_advantage=max_advantage)
    log_ratio, share, a = clipped_action(data, max_advantage)
    loss = -a * log_ratio + tau / 2 * log_ratio.square()
    return loss * share, ratio_metrics(log_ratio.detach(), torch.zeros_like(a, dtype=torch.bool))


@needs("old_log_prob", "zero_advantage")
def ratio_regression(data: LossInput, *, scale: float, max_advantage: float = 5.0) -> Loss:
    """Return ``(log r / scale - A)^2`` [B] and metrics [B]: regress the advantage on the log-ratio.

    REBEL (2404.16767), as Reg-GRPO of DeepVideo-R1 (2506.07464) takes it: the minimum is at ``log r
    = scale A``. **Differs:** Reg-GRPO standardises log r within the prompt's group; here `scale` is
    given. Its penalty is the `kl` section. `segment` and metrics as in `ppo_clip`; clip_frac is 0.

    Raises: ConfigError unless scale > 0 and max_advantage > 0.
    """
    check_positive("ratio_regression", scale=scale, max_advantage=max_advantage)
    log_ratio, share, a = clipped_action(data, max_advantage)
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
    log_ratio, share, a = clipped_action(data, max_advantage)
    ratio = log_ratio.detach().exp()
    stopped = _outward(ratio, a, clip_low, clip_high)
    weight = torch.where(a > 0, 1 / ratio, ratio).clamp_max(cap)
    # the value is -a weight; only log_ratio has a gradient
    moving = 1 + log_ratio - log_ratio.detach()
    kept = torch.where(stopped, weight, weight * moving)
    return -a * kept * share, ratio_metrics(log_ratio.detach(), stopped)


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
    log_ratio, share, a = clipped_action(data, max_advantage)
    divergence = (wide(now.detach()) - wide(old.detach())).square().flatten(1).mean(1)
    return masked(log_ratio, share, a, divergence, most)


@needs("ref", "siblings", "zero_advantage", "shared_noise")
def level_preference(
    data: LossInput, *, beta: float = 0.1, anisotropy: float = 2.5
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-ln sigmoid(b (g_w - g_l))`` [B], averaged over all pairs of a prompt's images with
    different advantages, the same for each of its images, and metrics [B].

    g is the log-prob less that of the base weights; b is beta, times `anisotropy` where w is of the
    prompt's best level. TRPA (2504.04524), its code (XueruiSu/Trust-Region-Preference-Approximation
    at f372585): beta 0.1, anisotropy 2.5, a KL to the policy that sampled of weight 0.001, which
    here is the section `kl`. Rewards should be of few levels.

    **Differs:** the code's best level is that of a right answer in the right form, here that of the
    prompt's best images; its loss is a mean over the pairs of a network call, here of a prompt; and
    where all images of the call are of one level it raises or lowers all of them, here such a
    prompt has no gradient.

    Metrics: `margin`, the mean of ``g_w - g_l`` over the prompt's pairs; `pairs`, their number.

    Raises: ConfigError unless beta and anisotropy are above 0, for a group that is torn over
    network calls, or images of a prompt that were not noised alike.
    """
    check_positive("level_preference", beta=beta, anisotropy=anisotropy)
    index = whole_groups("level_preference", data)
    check_alike("level_preference", data, index)
    gain = data.now.log_prob - data.under["ref"].log_prob.detach()
    level = data.batch.advantage.detach().double()
    known = torch.ones_like(index, dtype=torch.bool) if data.scored is None else data.scored
    best = torch.full_like(level, -torch.inf)
    judged = torch.where(known, level, -torch.inf)
    best = best.scatter_reduce(0, index, judged, "amax")[index]
    # pair [i, j]: i is preferred to j
    pair = (index[:, None] == index) & (level[:, None] > level) & known[:, None] & known
    width = beta * torch.where(level == best, anisotropy, 1.0)
    apart = gain[:, None] - gain
    each = torch.where(pair, -logsigmoid(width[:, None] * apart), 0.0).sum(1)
    number = total(index, pair.double().sum(1))
    loss = of_scored(data, total(index, each) / number.clamp_min(1))
    margin = total(index, torch.where(pair, apart.detach(), 0.0).sum(1)) / number.clamp_min(1)
    return loss, {"margin": margin, "pairs": number}


@needs("shared_noise")
def simple_preference(
    data: LossInput, *, beta: float, margin: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-ln sigmoid(beta (l_w - l_l) - margin)`` [B], the same for both images of a pair,
    and metrics [B]: no base model is asked.

    SimPO (2405.14734) and its code (princeton-nlp/SimPO at 1b3e8f3, sigmoid form without label
    smoothing, which has ``margin = beta gamma_beta_ratio``). l is the log-prob; SimPO divides that
    of a text by its length, here it is a mean over latent dimensions anyway. w and l as in
    `diffusion_dpo`: credit `best_worst`, one time and one noise for both.

    Metrics: `margin`, what is inside the sigmoid; `pair_accuracy`, 1 where it is above 0.

    Raises: ConfigError without `segment: {fn: prompt}`, for images of a prompt that were not noised
    alike, a beta not above 0, or a negative margin.
    """
    if not (beta > 0 and margin >= 0):
        raise ConfigError(
            f"simple_preference: expected beta > 0 and margin >= 0, got {beta=}, {margin=}"
        )
    if data.segment is None:
        raise ConfigError(
            "simple_preference: compares two images of a prompt in one network call; set "
            "segment={fn: prompt}, select={fn: nonzero} and credit={fn: best_worst}"
        )
    # a pair is two images of a prompt at one time, noised alike
    index = numbered(data.segment, data.batch.step)
    check_alike(
        "simple_preference", data, index, "both images of a pair must have the same time and noise"
    )
    # +1 for w and -1 for l: a pair's sum is l_w - l_l, and both rows get it
    sign = data.batch.advantage.detach().sign()
    zeros = torch.zeros_like(data.now.log_prob)
    inside = beta * zeros.index_add(0, index, sign * data.now.log_prob)[index] - margin
    said = inside.detach()
    return -logsigmoid(inside), {"margin": said, "pair_accuracy": (said > 0).double()}


def _outward(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """Say which rows have left the range on the side that their advantage pushes them to."""
    return ((a > 0) & (ratio > 1 + high)) | ((a <= 0) & (ratio < 1 - low))
