"""One reward's values -> better behaved ones, before several are added: ``(values [L], batch) ->
[L]``; NaN stays."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch


def clip(
    values: Tensor, batch: RewardBatch, *, low: float = float("-inf"), high: float = float("inf")
) -> Tensor:
    """Limit values [L] to [low, high]. Raises ConfigError if the range is empty."""
    if not low < high:
        raise ConfigError(f"clip: expected low < high, got low={low}, high={high}")
    return values.clamp(low, high)


def threshold(values: Tensor, batch: RewardBatch, *, at: float) -> Tensor:
    """Make values [L] yes or no: 1 where they are at least `at`, else 0. NaN stays.

    DanceGRPO's binary reward (2505.07818). It is one number for all prompts; `rank` compares the
    images of each.
    """
    return torch.where(values.isnan(), values, (values >= at).to(values.dtype))


def rank(values: Tensor, batch: RewardBatch) -> Tensor:
    """Replace each value by its rank among its prompt's -> [L] in [0, 1]; ties share the mean rank,
    one alone gets 0.5.

    Only the order is left: no outlier can take over, and no scale. Same as Pref-GRPO's win rate
    (2508.20751) with a scalar scorer as the judge.
    """
    known = (~values.isnan()).nonzero().flatten()
    mine, group = values[known], batch.group.to(values.device)[known]
    # each prompt's values in a row, lowest first; equal ones are a run
    order = torch.argsort(mine, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    row, prompt = mine[order], group[order]
    new = torch.ones_like(row, dtype=torch.bool)
    new[1:] = (row[1:] != row[:-1]) | (prompt[1:] != prompt[:-1])
    run = new.cumsum(0) - 1
    size = torch.bincount(run)
    place = (size.cumsum(0) - size)[run]
    count = torch.unique_consecutive(prompt, return_counts=True)[1]
    first = (count.cumsum(0) - count).repeat_interleave(count)
    others = count.repeat_interleave(count) - 1
    # those below, and half of those beside it
    beaten = (place - first + (size[run] - 1) / 2).to(values.dtype)
    share = torch.where(others > 0, beaten / others.clamp_min(1), 0.5)
    out = torch.full_like(values, torch.nan)
    out[known[order]] = share.to(values.dtype)
    return out
