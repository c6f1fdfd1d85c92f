"""Ranks within prompts, for panels of any size."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from flowrl.algorithms.reward_mix.transforms import rank
from flowrl.core.types import RewardBatch
from flowrl.cost.meter import Meter


def batch_of(group: torch.Tensor) -> RewardBatch:
    return RewardBatch(torch.zeros(len(group), 0), [], group, [], torch.zeros(len(group)))


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_ranks_are_scipys(levels: int) -> None:
    """``(mean rank - 1) / (n - 1)`` of scipy.stats.rankdata within each prompt, 0.5 for one alone,
    NaN for what was not scored; prompts in any order."""
    rng = torch.Generator().manual_seed(levels)
    group = torch.randint(40, (200,), generator=rng)
    values = torch.randint(levels, (200,), generator=rng).float() / 3
    values[torch.rand(200, generator=rng) < 0.1] = torch.nan
    wanted = torch.full_like(values, torch.nan)
    for g in group.unique():
        mine = ((group == g) & ~values.isnan()).nonzero().flatten()
        if len(mine):
            ranks = torch.tensor(stats.rankdata(values[mine].numpy())) - 1
            share = ranks / (len(mine) - 1) if len(mine) > 1 else torch.tensor([0.5])
            wanted[mine] = share.float()
    torch.testing.assert_close(rank(values, batch_of(group)), wanted, equal_nan=True)


def test_a_large_panel_takes_no_square() -> None:
    """8192 images: all pairs would be 256 MiB of float32; a few columns of 8192 numbers are not."""
    values = torch.rand(8192)
    with Meter() as meter:
        rank(values, batch_of(torch.arange(8192) // 8))
    assert meter.peak < 40 * 8 * 8192
