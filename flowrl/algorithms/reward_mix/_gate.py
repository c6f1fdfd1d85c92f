"""Which images' rewards are doubted: those that one reward likes and others do not."""

from __future__ import annotations

import torch
from torch import Tensor


def doubt(main: Tensor, others: list[Tensor]) -> Tensor:
    """Return how much better images [L] rank by `main` than by the mean of `others` -> [L] float64,
    NaN where one of them is. Rank 1 is the best; equal values share the mean of their ranks.

    GARDO (2512.24138). **Differs:** its code has the opposite sign, and so doubts images that its
    main reward likes less than the others do; it ranks equal values by their place in the batch,
    which is chance where a reward is 0 or 1.
    """
    known = torch.stack([main, *others]).isnan().any(0)
    ranks = [_rank(torch.where(known, -torch.inf, values)) for values in (main, *others)]
    gap = torch.stack(ranks[1:]).mean(0) - ranks[0]
    return torch.where(known, torch.nan, gap)


def most_doubted(gap: Tensor, share: float) -> Tensor:
    """Return which images [L] have a gap above the ``100 (1 - share)`` percentile of those that are
    not negative -> bool [L]."""
    high = gap[gap >= 0]
    if not len(high):
        return torch.zeros_like(gap, dtype=torch.bool)
    return gap > high.quantile(1 - share)


def next_share(
    share: float, level: float, history: list[float], least: float, most: float
) -> float:
    """Return the share after a mean gap `level`: a tenth larger above all of the history, a tenth
    smaller below all of it, within [least, most]."""
    if not history or level != level:
        return share
    if level > max(history):
        share *= 1.1
    elif level < min(history):
        share *= 0.9
    return min(max(share, least), most)


def _rank(values: Tensor) -> Tensor:
    """Rank values [L], the largest 1; equal ones share the mean of their ranks -> [L] float64."""
    _, place, equal = values.unique(return_inverse=True, return_counts=True)
    better = len(values) - equal.cumsum(0)  # than each value, of which the last is the best
    return (better + (equal.double() + 1) / 2)[place]
