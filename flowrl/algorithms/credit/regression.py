"""Credit that is a weight of at least 0, for losses that imitate good images."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import normalize_by, subtree_mean
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


def reward_softmax(
    reward: Tensor, leaf: Tensor, tree: Tree, *, temperature: float, standardize: bool = False
) -> Tensor:
    """Weigh a prompt's images by ``n softmax(reward / temperature)`` from rewards [L] -> [V]
    float32; n images were scored, so the mean weight is 1. Nodes above leaves have the mean below.

    Reward-weighted regression: ``exp(reward / temperature) / Z`` with Z over the prompt's images
    (RWR as in DDPO, 2305.13301, section 4.2, where it is the prompt's expectation). standardize:
    rewards are first centred by prompt and divided by the std of all images, so that a temperature
    fits rewards of any scale. NaN = not scored: weight 0.

    Raises: ConfigError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"reward_softmax: expected temperature > 0, got {temperature}")
    group = torch.unique(tree.group[leaf], return_inverse=True)[1]
    score = reward.double()
    if standardize:
        score = normalize_by(reward, group, std="global")
    scored = ~score.isnan()
    # above the prompt's highest, so that nothing overflows
    low = torch.full_like(score, -torch.inf)
    top = low.scatter_reduce(0, group, torch.where(scored, score, -torch.inf), "amax")
    power = torch.where(scored, ((score - top[group]) / temperature).exp(), 0.0)
    zeros = torch.zeros_like(score)
    total = zeros.index_add(0, group, power).clamp_min(torch.finfo(torch.float64).tiny)
    count = zeros.index_add(0, group, scored.double())
    weight = power * (count / total)[group]
    return subtree_mean(weight, leaf, tree).nan_to_num().float()


def best_of(
    reward: Tensor, leaf: Tensor, tree: Tree, *, keep: int = 1, equal: bool = False
) -> Tensor:
    """Give the `keep` best images of a prompt 1 and the others 0 from rewards [L] -> [V] float32;
    nodes above leaves have the mean of the leaves below.

    Best-of-n fine-tuning. Of equal images the first count; NaN = not scored: never among the best.
    A prompt whose scored images are all equal has no best: all have 0, unless `equal`, which takes
    the first of them, as RAFT does (2304.06767: the best of each prompt).

    Raises: ConfigError for keep below 1.
    """
    if keep < 1:
        raise ConfigError(f"best_of: expected keep >= 1, got {keep}")
    group = tree.group[leaf]
    sign = torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        if len(mine) and (equal or reward[mine].max() > reward[mine].min()):
            order = torch.sort(reward[mine], descending=True, stable=True).indices
            sign[mine[order[:keep]]] = 1.0
    return subtree_mean(sign, leaf, tree).nan_to_num().float()
