"""What the policy-gradient losses share: the clipped surrogate, actions of several decisions, and
logged values."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import refuse_if
from flowrl.core.types import LossInput


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


def probability_bounds(
    q: Tensor, low: float, high: float, *, most: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Return the least and the largest ratio r of a draw of probability q [B] with ``|r - 1| q r``
    at most `low` below 1 and `high` above it; never below 1/2, nor above `most`.

    DCPO (2509.02333), its code: ``(1 + sqrt(max(1 - 4 low / q, 0))) / 2`` and
    ``(1 + sqrt(1 + 4 high / q)) / 2``.
    """
    least = (1 + (1 - 4 * low / q).clamp_min(0).sqrt()) / 2
    return least, ((1 + (1 + 4 * high / q).sqrt()) / 2).clamp_max(most)


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
