"""What losses share: the clipped surrogate, the log-ratio of an action, checks, logged values, and
the pull of an estimate along a direction."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.core.devices import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]


def check_clip(who: str, clip_low: float, clip_high: float, max_advantage: float) -> None:
    """Raise ConfigError for a clip range or an advantage limit that is not positive."""
    if not (0 < clip_low <= 1 and clip_high > 0 and max_advantage > 0):
        raise ConfigError(
            f"{who} needs 0 < clip_low <= 1, clip_high > 0 and max_advantage > 0, got "
            f"clip_low={clip_low}, "
            f"clip_high={clip_high}, max_advantage={max_advantage}"
        )


def check_transition(who: str, data: LossInput) -> None:
    """Raise ConfigError where the steps that are compared have no std, as under `forward`."""
    wrong = ConfigError(
        f"{who}: compares steps with noise, and this likelihood has none with a std; take "
        "likelihood reverse"
    )
    refuse_if((data.now.std <= 0).any(), lambda: wrong)


def check_velocity(who: str, data: LossInput) -> None:
    """Raise ConfigError where `now.mean` is no velocity: a row of `forward` goes nowhere and has no
    std; a step of the sampler goes on, and initial noise has a std."""
    wrong = ConfigError(
        f"{who}: compares velocities with that of the straight path to an image; take likelihood "
        "forward"
    )
    moves = (data.batch.sigma != data.batch.sigma_next).any()
    refuse_if(moves | (data.now.std > 0).any(), lambda: wrong)


def surrogate(
    log_ratio: Tensor, a: Tensor, low: Tensor | float, high: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return ``max(-a r, -a clip(r, 1 - low, 1 + high))`` [B] and where clipping stops the
    gradient, bool [B]."""
    ratio = log_ratio.exp()
    clipped = torch.clamp(ratio, 1 - low, 1 + high)  # type: ignore[arg-type]
    loss = torch.maximum(-a * ratio, -a * clipped)
    return loss, (-a * clipped > -a * ratio).detach()


def ratio_metrics(log_ratio: Tensor, stopped: Tensor) -> dict[str, Tensor]:
    """Return ratio, clip_frac, clip_high_frac and approx_kl [B] of detached log-ratios."""
    return {
        "ratio": log_ratio.exp(),
        "clip_frac": stopped.to(log_ratio.dtype),
        "clip_high_frac": (stopped & (log_ratio > 0)).to(log_ratio.dtype),
        "approx_kl": torch.expm1(log_ratio)
        - log_ratio,  # expm1: r - 1 would lose all digits near 1
    }


def numbered(*keys: Tensor) -> Tensor:
    """Number rows by their keys, each [B] int64 -> [B] int64 from 0, equal where all keys are, in
    their order. Unlike `torch.unique` it does not make the host wait for the device."""
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[torch.argsort(key[order], stable=True)]
    new = torch.zeros_like(order)
    for key in keys:
        new[1:] |= (key[order].diff() != 0).long()
    return torch.empty_like(order).scatter(0, order, new.cumsum(0))


def segment_mean(values: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """Return each value's segment mean [B], differentiable, and one over the segment's size; None:
    each by itself."""
    if segment is None:
        return values, 1.0
    index = numbered(segment)
    zeros = torch.zeros_like(values)
    share = 1 / zeros.index_add(0, index, torch.ones_like(values)).clamp_min(1)
    return (zeros.index_add(0, index, values) * share)[index], share[index]


def clipped_action(data: LossInput, max_advantage: float) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return the log-ratio of each row's action [B], the row's share of it, and the advantage."""
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    return log_ratio, share, data.batch.advantage.detach().clamp(-max_advantage, max_advantage)


def masked(
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


Labels = Literal["all", "positive_only", "negative_only", "one_only", "binary"]


def optimality(advantage: Tensor, max_advantage: float, labels: Labels = "all") -> Tensor:
    """Turn advantages [B] into the probability of being good, ``clip(A / (2 max) + 1/2, 0, 1)``.

    labels: positive_only and negative_only set the others to 0 first; one_only makes good ones 1
    and all others 0; binary takes the sign. The last two are then divided by max_advantage like any
    A, so that with 5 they are 0.6, 0.5 and 0.4 (DiffusionNFT's code). -> [B] float64. Raises
    ConfigError for other labels.
    """
    a = advantage.double().clamp(-max_advantage, max_advantage)
    if labels == "positive_only":
        a = a.clamp_min(0)
    elif labels == "negative_only":
        a = a.clamp_max(0)
    elif labels == "one_only":
        a = (a > 0).double()
    elif labels == "binary":
        a = a.sign()
    elif labels != "all":
        raise ConfigError(f"nft: labels must be one of {get_args(Labels)}, got {labels!r}")
    return (a / max_advantage / 2 + 0.5).clamp(0, 1)


def pull(x: Tensor, direction: Tensor, anchor: Tensor, form: str, width: float) -> Tensor:
    """Return a loss [B], float64, whose descent moves x [B, *] along `direction` [B, *].

    It is the distance of x to ``x + direction``, which has no gradient, over ``mean |x - anchor|``,
    at least 1e-5: half the mean square, or with form "huber" ``mean(sqrt(d^2 + width^2) - width)``.
    """
    x, direction, anchor = x.double(), direction.double(), anchor.double()
    gap = x - (x.detach() + direction)
    size = (x.detach() - anchor).abs().flatten(1).mean(1).clamp_min(1e-5)
    if form == "huber":
        return ((gap.square() + width**2).sqrt() - width).flatten(1).mean(1) / size
    return gap.square().flatten(1).mean(1) / 2 / size
