"""Carry rewards from leaves up the forest, and normalise numbers within groups. Pure scatter
arithmetic."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


def subtree_mean(values: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Average the values [L] of the leaves below each node -> [V] float64; a leaf's is its own.

    NaN values are left out; a node without any other leaf below it gets NaN. One pass per denoising
    step, from clean to noise, because a parent always has taken fewer steps than its child.
    """
    scored = ~values.isnan()
    sums = torch.zeros(2, len(tree.parent), dtype=torch.float64, device=values.device)
    sums.index_add_(1, leaf, torch.stack([values.double().nan_to_num(), scored.double()]))
    parent = tree.parent.clamp_min(0)
    for step in range(int(tree.step.max()), 0, -1):
        sums.index_add_(1, parent, sums * (tree.step == step))
    return sums[0] / sums[1]


def subtree_softmax(
    values: Tensor, leaf: Tensor, tree: Tree, log_prob: Tensor, temperature: float
) -> Tensor:
    """Fuse the values [L] of the leaves below each node by how likely the ways there were -> [V]
    float64.

    A node's value is that of its children, weighted by the softmax of their edges' ``log_prob [V] /
    temperature``; a leaf's is its own. Children without a scored leaf are left out; a node without
    any other child gets NaN. Equal values of a group come back unchanged, to the bit.

    Raises: ConfigError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"softmax fusion: expected temperature > 0, got {temperature}")
    known = ~subtree_mean(values, leaf, tree).isnan()
    group = torch.unique(tree.group, return_inverse=True)[1]
    low = torch.full((len(group),), torch.inf, dtype=torch.float64, device=values.device)
    low = low.scatter_reduce(0, group[leaf], values.double().nan_to_num(nan=torch.inf), "amin")[
        group
    ]
    # above the group's lowest value, so that equal values are 0 and no rounding of the shares shows
    above = torch.zeros_like(low).index_add(0, leaf, values.double() - low[leaf]).nan_to_num()
    share = _sibling_softmax(log_prob.double(), tree.parent, known, temperature)
    parent = tree.parent.clamp_min(0)
    for step in range(int(tree.step.max()), 0, -1):
        above.index_add_(0, parent, share * above * (tree.step == step))
    return torch.where(known, low + above, torch.nan)


def _sibling_softmax(score: Tensor, parent: Tensor, known: Tensor, temperature: float) -> Tensor:
    """Return the softmax of scores [V] among the known children of each parent; 0 for roots and the
    others."""
    counts = known & (parent >= 0)
    parent = parent.clamp_min(0)
    top = torch.full_like(score, -torch.inf).scatter_reduce(
        0, parent, torch.where(counts, score, -torch.inf), "amax"
    )
    power = torch.where(counts, ((score - top[parent]) / temperature).exp(), 0.0)
    total = torch.zeros_like(score).index_add(0, parent, power)
    return torch.where(counts, power / total[parent], 0.0)


def normalize_by(
    values: Tensor,
    *keys: Tensor,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Centre values [N] by the mean of those with equal keys [N], divide by ``std + eps`` -> [N]
    float64.

    std "group": of the same group; "global": of all raw values, the spread between groups included
    (Flow-GRPO's default). ddof 0 divides by n, 1 by n - 1; a group too small for its ddof has std
    0. NaN values count nowhere and stay NaN. A group of equal values gives exactly 0, also with eps
    = 0.

    Raises: ConfigError for an unknown std, negative eps or ddof.
    """
    if std not in ("group", "global") or not eps >= 0 or ddof < 0:
        raise ConfigError(
            f'expected std "group" or "global", eps >= 0, ddof >= 0; got {std!r}, {eps=}, {ddof=}'
        )
    values = values.double()
    group = torch.unique(
        torch.stack([key.to(torch.int64) for key in keys]), dim=1, return_inverse=True
    )[1]
    gap, spread = _centre(values, group, ddof)
    if std == "global":
        spread = _centre(values, torch.zeros_like(group), ddof)[1]
    width = spread + eps
    return gap / torch.where(width > 0, width, 1.0)


def _centre(values: Tensor, group: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return values minus their group's mean [N] and the group's std, per value [N]."""
    scored = ~values.isnan()
    size = len(values)
    # the group's lowest value goes first: equal values then have mean 0 and std 0 without rounding
    low = values.new_full((size,), torch.inf)
    low = low.scatter_reduce(0, group, values.nan_to_num(nan=torch.inf), "amin")
    above = torch.where(scored, values - low[group], 0.0)
    count = values.new_zeros(size).index_add(0, group, scored.to(values.dtype))
    mean = values.new_zeros(size).index_add(0, group, above) / count.clamp_min(1)
    gap = torch.where(scored, above - mean[group], 0.0)
    total = values.new_zeros(size).index_add(0, group, gap.square())
    spread = torch.where(count > ddof, (total / (count - ddof).clamp_min(1)).sqrt(), 0.0)
    return torch.where(scored, gap, torch.nan), spread[group]
