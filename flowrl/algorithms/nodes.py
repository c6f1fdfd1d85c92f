"""Which nodes of a forest are trained, which state each belongs to, and where its rows stand."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.noise_path import vp_from_flow, wide
from flowrl.core.types import Rollout, StateRows, Tree

Trains = Literal["draws", "leaves", "roots", "steps"]
KINDS = ("finished", "preview", "coarse", "baseline")
"""What a leaf can be: see `leaf_kinds`."""


def trained_nodes(rollout: Rollout, trains: Trains) -> Tensor:
    """List the nodes that a likelihood trains -> [N] int64.

    draws: `decision_nodes`. leaves: in the rollout's order. roots: one of equal ones. steps: where
    a step ended, clean nodes included.
    """
    if trains == "draws":
        return decision_nodes(rollout)
    if trains == "leaves":
        return rollout.leaf
    if trains == "steps":
        return (rollout.tree.parent >= 0).nonzero().flatten()
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


def leaf_kinds(tree: Tree, leaf: Tensor) -> Tensor:
    """Say what each leaf [L] is -> place in `KINDS` [L] int64.

    finished: where a trajectory ends. preview: hung under a node from which the trajectory goes on.
    coarse: finished from a node that has a leaf of its own already, in longer steps. baseline: the
    sample without noise under a root that goes on.
    """
    size, parent, has = len(tree.parent), tree.parent, tree.parent >= 0
    # nodes with children, and those of whose children one has children
    inner = torch.zeros(size, dtype=torch.bool, device=parent.device)
    inner[parent[has]] = True
    goes_on = torch.zeros_like(inner)
    goes_on[parent[has & inner]] = True
    # the first leaf below each node that was made without a draw
    above, plain = parent[leaf], tree.std[leaf] == 0
    first = torch.full((size,), size, device=parent.device)
    first.scatter_reduce_(0, above[plain].clamp_min(0), leaf[plain], "amin")
    # the kinds
    kind = torch.zeros_like(leaf)
    kind[plain & (first[above] != leaf)] = KINDS.index("coarse")
    kind[goes_on[above]] = KINDS.index("preview")
    kind[goes_on[above] & (parent[above] < 0) & plain] = KINDS.index("baseline")
    return kind


def leaf_sigmas(rollout: Rollout, tail: Tensor) -> Tensor:
    """Return the sigma of the state that each leaf is the x0 estimate of -> [L] float32; 0 for
    images that took more steps, or are where a trajectory ends. tail [S]: the plan's."""
    tree, leaf = rollout.tree, rollout.leaf
    taken = tree.step[tree.parent[leaf].clamp_min(0)]
    # the first leaf below a draw that has previews of one jump
    tails = tail.to(leaf.device)[(taken - 1).clamp_min(0)]
    jumped = first_below_draw(tree, leaf) & (tails == 1)
    return torch.where(jumped, rollout.sigmas[taken], 0.0)


def first_below_draw(tree: Tree, leaf: Tensor) -> Tensor:
    """Say which leaves [L] no draw made and are the first below the draw above them -> [L] bool:
    how each candidate goes on without noise."""
    above, size = tree.parent[leaf].clamp_min(0), len(tree.parent)
    first = torch.full((size,), size, device=leaf.device).scatter_reduce(0, above, leaf, "amin")
    return (tree.std[above] > 0) & (tree.std[leaf] == 0) & (first[above] == leaf)


def clean_latents(rollout: Rollout, leaves: Tensor) -> Tensor:
    """Return what leaves [N] are decoded from, as data of level 0 -> [N, *] in float32 or wider.

    They are the rollout's own latents, bit for bit, where the grid ends at 0. The DDIM grids of
    Stable Diffusion 1 and XL end at sigma 0.028, and their pipelines decode what is left there as
    if it were clean: in coordinates of the flow path that is ``x / hypot(1 - sigma, sigma)``.
    """
    x = wide(rollout.x[leaves])
    return vp_from_flow(x, rollout.sigmas[-1:])


def states_of(rollout: Rollout, nodes: Tensor, trains: Trains = "draws") -> Tensor:
    """Return the state that the network is asked about for each node [N] -> node ids [N].

    A draw's is the node that it was drawn from; equal latents have one id. Leaves and roots are
    their own.
    """
    if trains != "draws":
        return nodes
    parent = rollout.tree.parent[nodes]
    return parent if rollout.twin is None else rollout.twin[parent]


def state_rows(state: Tensor) -> StateRows:
    """Say which rows of a network call share a state: state [B] int64, equal where they do.

    On an accelerator the host waits for the count of states, so hand over ids on the host.
    """
    ids, index = torch.unique(state, return_inverse=True)
    row = torch.arange(len(state), device=index.device)
    first = torch.full_like(ids, len(state)).scatter_reduce(0, index, row, "amin")
    return StateRows(first, index)


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


def count_trained(rollout: Rollout, trains: Trains, nodes: Tensor) -> Tensor:
    """Count the trained nodes of the prompt of each node [B] -> [B] int64."""
    group = rollout.tree.group
    size = torch.bincount(group[trained_nodes(rollout, trains)])
    return size[group[nodes]]


def cond_of(rollout: Rollout, nodes: Tensor) -> dict[str, Tensor]:
    """Copy the text conditioning of nodes [N] -> {name: [N, ...]}."""
    ids, order = torch.sort(rollout.group_ids)
    row = order[torch.searchsorted(ids, rollout.tree.group[nodes])]
    return {name: value[row] for name, value in rollout.cond.items()}


def climb(up: Tensor, steps: int) -> Tensor:
    """Follow pointers [V] upwards to the node that points to itself -> [V]; paths have at most
    `steps` edges."""
    for _ in range(steps.bit_length()):  # each round doubles the reach
        up = up[up]
    return up


def root_above(rollout: Rollout) -> Tensor:
    """Return the root above each node -> [V] int64."""
    parent = rollout.tree.parent
    node = torch.arange(len(parent), device=parent.device)
    return climb(torch.where(parent < 0, node, parent), len(rollout.sigmas) - 1)


def initial_noise(rollout: Rollout, nodes: Tensor) -> Tensor:
    """Return the noise of std 1 from which the images of nodes [B] were sampled -> [B, *], at least
    float32."""
    x = wide(rollout.x[root_above(rollout)[nodes]])
    return vp_from_flow(x, rollout.sigmas[:1])
