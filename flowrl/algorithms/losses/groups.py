"""Losses that compare all images of a prompt, which must be in one network call. Unreduced: one
value per row; only the training loop divides. An image that was not scored is in no pair and in no
mean over its prompt, and has loss 0."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from flowrl.algorithms.losses._common import check_velocity, numbered, ratio_metrics
from flowrl.algorithms.losses._groups import (
    centre_of,
    check_alike,
    check_positive,
    counted,
    of_scored,
    total,
    velocity_error,
    whole_groups,
    whole_prompts,
)
from flowrl.core.needs import needs
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]


@needs("ref", "old", "siblings", "shared_noise")
def dgpo(
    data: LossInput,
    *,
    beta: float,
    clip: float = 0.05,
    max_advantage: float = 5.0,
    reference: Literal["ref", "old"] = "ref",
) -> Loss:
    """Return ``w A d`` [B] and metrics [B]: the matching loss, weighted by advantage and by how
    little the prompt's group is better than under the reference.

    d, d_ref and d_old are the mean squared errors of the velocity under the current, the
    `reference` and the sampling weights, at one time and one noise for the whole group. ``w =
    sigmoid(S)`` without a gradient, ``S = beta sum_i A_i (d_i - d_ref_i) / G``: 1/2 at the
    reference weights, near 0 for a group that beats them clearly. A row has no gradient if
    ``exp(d_old - d)`` has left 1 ± `clip` on the side that A pushes to.

    reference: ref, the base weights; old, the sampling weights. What the model gains over these
    in an iteration is small, so `beta` is large there.

    Source: DGPO (2510.08425), its code: beta 100 (PickScore 10), clip 0.05 or 0.01; without
    guidance 100 and 1e-3, or with reference old 2000 and 1e-5.

    **Differs:** the code's first 200 iterations are sampled with the current weights, here the copy
    `old` samples always. Its base model is guided by 4.5 for GenEval without guidance in sampling:
    `train.reference_guidance`.

    Metrics: `weight`, w; `clip_frac`, 1 where a row is stopped; `margin`, -S.

    Raises: ConfigError unless beta, clip and max_advantage are above 0, for a group that is torn
    over network calls, or images of a prompt that were not noised alike.
    """
    check_positive("dgpo", beta=beta, clip=clip, max_advantage=max_advantage)
    index = whole_groups("dgpo", data)
    check_alike("dgpo", data, index)
    check_velocity("dgpo", data)
    a = data.batch.advantage.detach().double().clamp(-max_advantage, max_advantage)
    # errors under the three weights
    d = velocity_error(data, data.now)
    ref, old = (velocity_error(data, data.under[name]).detach() for name in (reference, "old"))
    # how much better the group is than under the reference
    score = beta * centre_of(index, a * (d.detach() - ref), counted(data, index))
    weight = score.sigmoid()
    # no gradient for what has moved far enough
    ratio = (old - d.detach()).exp()
    stopped = ((a > 0) & (ratio > 1 + clip)) | ((a <= 0) & (ratio < 1 - clip))
    loss = of_scored(data, weight * a * torch.where(stopped, d.detach(), d))
    return loss, {"weight": weight, "margin": -score, "clip_frac": stopped.double()}


@needs("slow", "siblings", "zero_advantage")
def crd(
    data: LossInput,
    *,
    beta: float = 1.0,
    form: Literal["mse", "bce"] = "mse",
    centre: Literal["mean", "soft", "hard", "hard_published"] = "mean",
    temperature: float = 0.5,
    among: Literal["group", "call"] = "group",
    normalize: bool = True,
    max_advantage: float = 5.0,
) -> Loss:
    """Return the distance [B] of the model's own reward, centred, to the given one, centred, times
    ``max_advantage / beta``, and metrics [B]: centred reward distillation.

    The model's reward of an image is how much better it fits than the slow copy,
    ``r = -(mean (v - u)^2 / w - mean (v_slow - u)^2 / w_slow)``; w is the mean absolute error of
    its own velocity without a gradient, at least 1e-5, or 1 without `normalize`. The given one is
    ``q = clip(A / (2 max_advantage) + 1/2, 0, 1)``. form "mse": ``(beta (r - r') - (q - q'))^2``;
    "bce": cross-entropy of ``beta (r - r')`` with ``sigmoid(q - q')``. r' and q' have no gradient.

    centre: of what r' and q' are means. mean: all images alike. soft: half of the loss with weights
    ``softmax(q / temperature)``, half with ``softmax(-q / temperature)``. hard: the same halves
    over the images with q above 1/2 and over the others, ``softmax(q)`` and ``softmax(-q)``; a side
    without images takes all alike. hard_published: as in Flow-Factory, which splits at 0, so that
    nearly all images are in the first half.

    Source: CRD (2603.14128), as in Flow-Factory; slow there has decay ``0.25 + 0.005 t``, at most
    0.999. **Differs:** means are over the images of a prompt at one time; `among` "call" takes all
    of a network call, as published, where easy and hard prompts mix.

    Metrics: `implicit_reward`, r; `target`, q.

    Raises: ConfigError unless beta, temperature and max_advantage are above 0, for a group that is
    torn over network calls, or for images that are centred together at different times:
    `likelihood.shared_times`, or as many draws as steps, which alone will do `among` "call".
    """
    check_positive("crd", beta=beta, temperature=temperature, max_advantage=max_advantage)
    index = _centred_together(data, among)
    check_velocity("crd", data)
    a = data.batch.advantage.detach().double().clamp(-max_advantage, max_advantage)
    target = a / (2 * max_advantage) + 0.5
    reward = -(
        velocity_error(data, data.now, normalize=normalize)
        - velocity_error(data, data.under["slow"], normalize=normalize).detach()
    )
    # one half of the loss for each way to centre
    loss = torch.zeros_like(reward)
    ways = _ways(target, index, centre, temperature, counted(data, index))
    for weight in ways:
        middle = centre_of(index, reward.detach(), weight), centre_of(index, target, weight)
        gap, aim = beta * (reward - middle[0]), target - middle[1]
        if form == "mse":
            part = (gap - aim).square()
        else:
            part = binary_cross_entropy_with_logits(gap, aim.sigmoid(), reduction="none")
        loss = loss + part / len(ways)
    metrics = {"implicit_reward": reward.detach(), "target": target}
    return of_scored(data, loss) * (max_advantage / beta), metrics


@needs("old_log_prob", "siblings", "zero_advantage")
def group_regression(data: LossInput, *, eps: float = 1e-3, max_advantage: float = 5.0) -> Loss:
    """Return ``((l - mean l) / (std l + eps) - A)^2`` [B] and metrics [B]: regress the advantage on
    the standardised log-ratio ``l = log r`` of a prompt's images.

    Mean and std (of n) are over the rows of one prompt at one step or draw; both have a gradient.
    Without a scale of its own l has to be in the order and proportion of the advantages, however
    far it moves. Source: Reg-GRPO of DeepVideo-R1 (2506.07464). Reconstruction, read second hand:
    its text adds ``-beta KL`` to the loss, which is taken for a penalty and is the section `kl`
    here. `ratio_regression` has a given scale.

    **Differs:** `eps` is ours: at the weights that sampled every l is 0, and the loss is that of
    `ratio_regression` with scale `eps`, centred. A text has one l, here each step of an image has.

    Metrics as in `ppo_clip`; clip_frac is 0.

    Raises: ConfigError unless eps and max_advantage are above 0, or for a group that is torn over
    network calls.
    """
    check_positive("group_regression", eps=eps, max_advantage=max_advantage)
    index = whole_prompts("group_regression", data)
    a = data.batch.advantage.detach().double().clamp(-max_advantage, max_advantage)
    log_ratio = data.now.log_prob - data.old_log_prob.detach()
    weight = counted(data, index)
    gap = log_ratio - centre_of(index, log_ratio, weight)
    variance = centre_of(index, gap.square(), weight)
    # the root of 0 has no gradient
    std = torch.where(variance > 0, torch.where(variance > 0, variance, 1.0).sqrt(), 0.0)
    loss = of_scored(data, (gap / (std + eps) - a).square())
    return loss, ratio_metrics(log_ratio.detach(), torch.zeros_like(a, dtype=torch.bool))


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


def _centred_together(data: LossInput, among: str) -> Tensor:
    """Number the rows [B] of images that are centred together. Raises ConfigError for a torn group,
    or images at different times."""
    if among == "group":
        index, whose = whole_groups("crd", data), "all images of a prompt"
        mend = "likelihood.shared_times=true, or as many likelihood.draws as steps to draw from"
    else:
        index, whose = numbered(data.batch.step), "all images of a network call"
        mend = "as many likelihood.draws as steps to draw from, or loss.among=group"
    check_alike("crd", data, index, f"{whose} must have one time", mend)
    return index


def _ways(
    target: Tensor, index: Tensor, centre: str, temperature: float, alike: Tensor
) -> list[Tensor]:
    """Return the weights [B] of the means that are subtracted, unnormalised, per half; `alike`:
    those of a mean that takes all images alike."""
    if centre == "mean":
        return [alike]
    if centre == "soft":
        return [alike * (target / temperature).exp(), alike * (-target / temperature).exp()]
    # the published code has bad ones only below 0, and there are none
    bad = target < 0 if centre == "hard_published" else target <= 0.5
    good = target > (0 if centre == "hard_published" else 0.5)
    sides = [(good, target.exp()), (bad, (-target).exp())]
    ways = []
    for inside, weight in sides:
        weight = torch.where(inside, alike * weight, 0.0)
        empty = total(index, weight) == 0
        ways.append(torch.where(empty, alike, weight))
    return ways
