"""Credit by rankings alone: who stands before whom, and by how many places."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


def rank_edges(reward: Tensor, leaf: Tensor, tree: Tree, *, best: int = 0) -> Tensor:
    """Give each image the number of images that it is ranked before, minus that of those ranked
    before it, over the number of comparisons, from rewards [L] -> advantage per node [V] float32.

    ZO-RankSGD (2303.03751), eq. 4: of m images of a prompt the `best` first are in order and stand
    before all others, whose order is not known; 0 = all are in order. With likelihood `prior`,
    ``start: noise`` and a small spread its policy gradient is the paper's descent direction. Only
    the order of the rewards counts; equal ones are not compared, and those that equal the last of
    the best are among them. NaN = not scored: compared with none, advantage 0.

    **Differs:** the published code gives the image of rank r, from 0, ``m - 2 r`` in place of
    ``m - 1 - 2 r``, so its weights do not add up to 0; and it searches along the direction by
    asking for another ranking, which no step here does.

    Raises: ConfigError for a negative `best`.
    """
    if best < 0:
        raise ConfigError(f"rank_edges: expected best >= 0, got {best}")
    group, worth = tree.group[leaf], torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        score = reward[mine]
        if best and len(mine) > best:
            # below the best, order is not known: all are as good as the next. Whoever is as good
            # as the last of the best is one of them
            below = score[score < score.sort(descending=True).values[best - 1]]
            score = score.clamp_min(below.max()) if len(below) else score
        before = (score[:, None] > score[None, :]).double()
        edges = before.sum()
        if bool(edges > 0):
            worth[mine] = (before.sum(1) - before.sum(0)) / edges
    worth[reward.isnan()] = torch.nan
    return subtree_mean(worth, leaf, tree).nan_to_num().float()
