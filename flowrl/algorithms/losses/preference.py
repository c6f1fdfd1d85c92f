"""Losses of pairs of images: one is preferred to the other. Unreduced: one value per row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.algorithms.losses._common import numbered
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import refuse_if
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
    _check_alike(data, index)
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
    _check_alike(data, index)
    # +1 for w and -1 for l: a pair's sum is l_w - l_l, and both rows get it
    sign = data.batch.advantage.detach().sign()
    zeros = torch.zeros_like(data.now.log_prob)
    inside = beta * zeros.index_add(0, index, sign * data.now.log_prob)[index] - margin
    said = inside.detach()
    return -logsigmoid(inside), {"margin": said, "pair_accuracy": (said > 0).double()}


def _check_alike(data: LossInput, index: Tensor) -> None:
    """Raise ConfigError unless rows of one pair [B] have one time."""
    sigma = data.batch.sigma
    high = torch.full_like(sigma, -1).scatter_reduce(0, index, sigma, "amax")[index]
    wrong = ConfigError(
        "loss: both images of a pair must have the same time and noise; set likelihood.shared=true"
    )
    refuse_if((high != sigma).any(), lambda: wrong)
