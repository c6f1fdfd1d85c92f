"""Which nodes of a forest are trained, which state each belongs to, and where its rows stand."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.types import Rollout

Trains = Literal["draws", "leaves", "roots"]


def trained_nodes(rollout: Rollout, trains: Trains) -> Tensor:
    """List the nodes that a likelihood trains -> [N] int64.

    draws: `decision_nodes`. leaves: in the rollout's order. roots: one of equal ones.
    """
    if trains == "draws":
        return decision_nodes(rollout)
    if trains == "leaves":
        return rollout.leaf
    roots = (rollout.tree.parent < 0).nonzero().flatten()
    return roots if rollout.twin is None else roots[rollout.twin[roots] == roots]


def decision_nodes(rollout: Rollout, *, skip_last: bool = True) -> Tensor:
    """List the nodes that were made by a draw -> [N] int64, in the order of the rollout.

    skip_last leaves out draws of the last denoising step: their noise stays in the image, and
    published code does not train them (Flow-GRPO: the first ``int(0.99 steps)``).
    """
    wanted = rollout.tree.std > 0
    if skip_last:
        wanted = wanted & (rollout.tree.step < len(rollout.sigmas) - 1)
    return wanted.nonzero().flatten()


def states_of(rollout: Rollout, nodes: Tensor, trains: Trains = "draws") -> Tensor:
    """Return the state that the network is asked about for each node [N] -> node ids [N].

    A draw's is the node that it was drawn from; equal latents have one id. Leaves and roots are
    their own.
    """
    if trains != "draws":
        return nodes
    parent = rollout.tree.parent[nodes]
    return parent if rollout.twin is None else rollout.twin[parent]


def best_below(rollout: Rollout, advantage: Tensor) -> Tensor:
    """Find the leaf with the highest advantage [V] below each node, the first of equals -> node ids
    [V] int64."""
    tree = rollout.tree
    none = len(advantage)
    # leaves are their own best
    best = torch.full_like(advantage, -torch.inf)
    best[rollout.leaf] = advantage[rollout.leaf]
    where = torch.full_like(tree.parent, none)
    where[rollout.leaf] = rollout.leaf
    # from clean to noise: a parent has taken fewer steps than its child
    for step in range(len(rollout.sigmas) - 1, 0, -1):
        here = ((tree.step == step) & (tree.parent >= 0)).nonzero().flatten()
        up, before = tree.parent[here], best.clone()
        best.scatter_reduce_(0, up, best[here], "amax")
        where[best > before] = none
        where.scatter_reduce_(0, up, torch.where(best[here] == best[up], where[here], none), "amin")
    return where


def cond_of(rollout: Rollout, nodes: Tensor) -> dict[str, Tensor]:
    """Copy the text conditioning of nodes [N] -> {name: [N, ...]}."""
    ids, order = torch.sort(rollout.group_ids)
    row = order[torch.searchsorted(ids, rollout.tree.group[nodes])]
    return {name: value[row] for name, value in rollout.cond.items()}
