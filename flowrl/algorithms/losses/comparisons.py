"""Losses that compare images of a prompt, or draws from one state, which must be in one network
call. Unreduced: one value per row; only the training loop divides. An image that was not scored is
in no pair and in no mean over its prompt, and has loss 0."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from flowrl.algorithms.losses._common import Loss, check_velocity, numbered
from flowrl.algorithms.losses._groups import (
    centre_of,
    check_alike,
    check_positive,
    counted,
    of_scored,
    total,
    velocity_error,
    whole_groups,
)
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("ref", "shared_noise")
def diffusion_dpo(data: LossInput, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-ln sigmoid(-(beta / 2) ((m_w - m_l) - (n_w - n_l)))`` [B], the same for both images
    of a pair, and metrics [B].

    m is the matching error of the current weights, n that of the base weights, both minus the
    log-prob of likelihood `forward`; w is the preferred image of a prompt (advantage 1), l the
    other (-1), as credit `best_worst` says, at one time and one noise. At the base weights the loss
    is ln 2. Source: Diffusion-DPO (2311.12908), eq. 14; online and with the target ``eps - x0``
    as in Flow-GRPO's code.

    beta belongs to errors that are means over latent dimensions.

    Metrics: `margin`, what is inside the sigmoid; `pair_accuracy`, 1 where it is above 0.

    Raises: ConfigError without `segment: {fn: prompt}`, for images of a prompt that were not noised
    alike, or a beta that is not above 0.
    """
    if not beta > 0:
        raise ConfigError(f"diffusion_dpo: expected beta > 0, got {beta}")
    if data.segment is None:
        raise ConfigError(
            "diffusion_dpo: compares two images of a prompt in one network call; set "
            "segment={fn: prompt}, select={fn: nonzero} and credit={fn: best_worst}"
        )
    # rows of one prompt and one draw are a pair
    index = numbered(data.segment, data.batch.step)
    check_alike(
        "diffusion_dpo", data, index, "both images of a pair must have the same time and noise"
    )
    gain = data.now.log_prob - data.under["ref"].log_prob.detach()
    sign = data.batch.advantage.detach().sign()
    zeros = torch.zeros_like(gain)
    margin = beta / 2 * zeros.index_add(0, index, sign * gain)[index]
    inside = margin.detach()
    return -logsigmoid(margin), {"margin": inside, "pair_accuracy": (inside > 0).double()}


@needs("ref")
def step_preference(
    data: LossInput, *, beta: float = 10.0, clip: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-ln sigmoid(beta (ln r_w - ln r_l))`` [B], the same for both draws of a pair, and
    metrics [B]; ``r = clip(exp(log_prob - ref_log_prob), 1 - clip, 1 + clip)``.

    SPO (2406.04314), its code: beta 10, clip 0.1, log-probs that are means over latent dimensions.
    w is the draw of advantage 1, l that of -1, both from one state, as credit `candidate_pairs`
    says. A side that has reached its end of the range has no gradient. At the base weights the loss
    is ln 2.

    Metrics: `margin`, what is inside the sigmoid; `pair_accuracy`, 1 where it is above 0;
    `clip_frac`.

    Raises: ConfigError without `segment: {fn: siblings}`, or for a beta or clip out of range.
    """
    if not (beta > 0 and 0 < clip < 1):
        raise ConfigError(
            f"step_preference: expected beta > 0 and 0 < clip < 1, got {beta=}, {clip=}"
        )
    if data.segment is None:
        raise ConfigError(
            "step_preference: compares two draws from one state in one network call; set "
            "segment={fn: siblings}, select={fn: nonzero} and credit={fn: candidate_pairs}"
        )
    # the pair of each row [B]; clamped ratios have no gradient beyond the end of the range
    index = numbered(data.segment)
    ratio = (data.now.log_prob - data.under["ref"].log_prob.detach()).exp()
    kept = ratio.clamp(1 - clip, 1 + clip)
    # +1 for w and -1 for l: a pair's sum is ln r_w - ln r_l, and both rows get it
    sign = data.batch.advantage.detach().sign()
    zeros = torch.zeros_like(ratio)
    margin = beta * zeros.index_add(0, index, sign * kept.log())[index]
    inside, stopped = margin.detach(), (kept != ratio).detach()
    accuracy = (inside > 0).double()
    return -logsigmoid(margin), {
        "margin": inside,
        "pair_accuracy": accuracy,
        "clip_frac": stopped.double(),
    }


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
