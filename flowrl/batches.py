"""From a rollout and its weights to batches that are ready for one network call."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.types import Batch, Rollout


def decision_nodes(rollout: Rollout, *, skip_last: bool = True) -> Tensor:
    """List the nodes that were made by a draw -> [B] int64, in the order of the rollout.

    skip_last leaves out draws of the last denoising step: their noise stays in the picture, and published code does
    not train them (Flow-GRPO: the first ``int(0.99 steps)``).
    """
    wanted = rollout.tree.std > 0
    if skip_last:
        wanted = wanted & (rollout.tree.step < len(rollout.sigmas) - 1)
    return wanted.nonzero().flatten()


def decisions(rollout: Rollout, weight: Tensor, *, skip_last: bool = True, nodes: Tensor | None = None) -> Batch:
    """Collect decisions with their weight [V] -> Batch of B.

    nodes [B] picks some of `decision_nodes` (skip_last is then not looked at): conditioning is copied once per
    decision, so take no more of them at a time than one network call needs.
    """
    tree = rollout.tree
    node = decision_nodes(rollout, skip_last=skip_last) if nodes is None else nodes
    parent = tree.parent[node]
    state = states_of(rollout, node)
    row = rows_of(rollout, tree.group[node])
    return Batch(
        x=rollout.x[parent],
        sigma=rollout.sigmas[tree.step[parent]],
        sigma_next=rollout.sigmas[tree.step[node]],
        level=rollout.level[node],
        target=rollout.x[node],
        old_log_prob=rollout.log_prob[node],
        weight=weight[node],
        node=node,
        parent=state,
        step=tree.step[parent],
        cond={name: value[row] for name, value in rollout.cond.items()},
    )


def states_of(rollout: Rollout, nodes: Tensor) -> Tensor:
    """Return the state that each decision was drawn from [B] -> node ids [B]; equal latents have one id."""
    parent = rollout.tree.parent[nodes]
    return parent if rollout.twin is None else rollout.twin[parent]


def best_below(rollout: Rollout, weight: Tensor) -> Tensor:
    """Find the leaf with the highest weight [V] below each node, the first of equals -> node ids [V] int64."""
    tree = rollout.tree
    none = len(weight)
    best = torch.full_like(weight, -torch.inf)
    best[rollout.leaf] = weight[rollout.leaf]
    where = torch.full_like(tree.parent, none)
    where[rollout.leaf] = rollout.leaf
    for step in range(len(rollout.sigmas) - 1, 0, -1):  # a parent has taken fewer steps than its child
        here = ((tree.step == step) & (tree.parent >= 0)).nonzero().flatten()
        up, before = tree.parent[here], best.clone()
        best.scatter_reduce_(0, up, best[here], "amax")
        where[best > before] = none
        where.scatter_reduce_(0, up, torch.where(best[here] == best[up], where[here], none), "amin")
    return where


def take(batch: Batch, index: Tensor) -> Batch:
    """Pick rows of a batch by index [N] int64 (or bool [B]), conditioning included."""
    fields = {name: value[index] for name, value in batch._asdict().items() if name != "cond"}
    return Batch(**fields, cond={name: value[index] for name, value in batch.cond.items()})


def rows_of(rollout: Rollout, group: Tensor) -> Tensor:
    """Find the rows of ``rollout.cond`` for group ids [B] -> [B] int64."""
    ids, order = torch.sort(rollout.group_ids)
    return order[torch.searchsorted(ids, group)]
