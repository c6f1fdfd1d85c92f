"""Credit for comparisons: who is preferred to whom."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.core.types import Tree


def best_worst(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Give a prompt's best image 1 and its worst -1 from rewards [L] -> [V] float32; other images
    have 0, nodes above leaves the mean of the leaves below.

    The pair of Diffusion-DPO (2311.12908), made on line. Of equal images the first counts. A prompt
    whose scored images are all equal has no pair. NaN = not scored: never in a pair.
    """
    group = tree.group[leaf]
    sign = torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        if not len(mine):
            continue
        best, worst = mine[reward[mine].argmax()], mine[reward[mine].argmin()]
        if reward[best] > reward[worst]:
            sign[best], sign[worst] = 1.0, -1.0
    return subtree_mean(sign, leaf, tree).nan_to_num().float()
