"""How likely is it that something is drawn at all, when some of few are drawn one after the
other?"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.selection._change import rank_within

MOST = 8
"""Items of a family that can be enumerated: 2**MOST subsets."""


def inclusion(odds: Tensor, family: Tensor, take: Tensor) -> Tensor:
    """Return the probability that each item [N] is among those drawn -> [N] float64.

    Of each family (id [N], at most MOST items) `take` [N] are drawn one after the other without
    replacement, each time with probability proportional to `odds` [N] above 0. Exact: goes through
    all subsets in the order of their size.
    """
    # families as rows of a table: p [families, slots], 0 where a family is smaller
    row = torch.unique(family, return_inverse=True)[1]
    slot, size = rank_within(torch.zeros_like(odds), row)
    rows, slots = int(row.max()) + 1, int(size.max())
    p = odds.new_zeros(rows, slots).index_put((row, slot), odds)
    # a subset is the number whose bits are its items
    subset = torch.arange(2**slots, device=odds.device)
    holds = (
        subset[:, None].bitwise_right_shift(torch.arange(slots, device=odds.device)) % 2 == 1
    )  # [2^slots, slots]
    rest = (p @ (~holds).to(p.dtype).T).clamp_min(
        torch.finfo(p.dtype).tiny
    )  # odds of what is not drawn yet
    # chance [families, 2^slots]: that the items drawn so far are just this subset; none at first
    chance = torch.zeros_like(rest)
    chance[:, 0] = 1.0
    for drawn in range(slots):
        for item in range(slots):
            before = subset[(holds.sum(1) == drawn) & ~holds[:, item]]
            chance[:, before + 2**item] += (
                chance[:, before] * p[:, item : item + 1] / rest[:, before]
            )
    # add up the subsets of the size that was asked for, for each item that they hold
    asked = torch.zeros(rows, dtype=take.dtype, device=take.device).scatter(0, row, take)
    return ((chance * (holds.sum(1) == asked[:, None])) @ holds.to(p.dtype))[row, slot]
