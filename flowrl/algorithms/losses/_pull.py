"""The pull of an x0 estimate along a direction."""

from __future__ import annotations

from torch import Tensor


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
