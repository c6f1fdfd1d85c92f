"""What segments and select share: which draws are trained, who is above them, and their order
within families."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import root_above
from flowrl.core.types import Rollout, Tree


def trained_draws(rollout: Rollout) -> Tensor:
    """Say which nodes are draws that are trained -> [V] bool; draws of the last denoising step
    never are."""
    return (rollout.tree.std > 0) & (rollout.tree.step < len(rollout.sigmas) - 1)


def drawn_at(tree: Tree) -> Tensor:
    """Return the denoising step that each node was made from -> [V] int64; 0 for roots."""
    return tree.step[tree.parent.clamp_min(0)]


def rank_within(key: Tensor, family: Tensor) -> tuple[Tensor, Tensor]:
    """Rank keys [N] among those of equal family [N], lowest first, ties in order -> rank [N], size
    of family [N]."""
    index = torch.unique(family, return_inverse=True)[1]
    order = torch.argsort(key, stable=True)
    order = order[torch.argsort(index[order], stable=True)]
    size = torch.bincount(index)
    first = size.cumsum(0) - size
    place = torch.arange(len(key), device=key.device) - first[index[order]]
    return torch.empty_like(place).scatter(0, order, place), size[index]


def one_of_each(rollout: Rollout, nodes: Tensor, rng: torch.Generator) -> Tensor:
    """Draw one of the steps of each image, by the nodes [N] that they ended in -> [M], in the
    order of the nodes."""
    # in a random order, the first of each root
    order = torch.randperm(len(nodes), generator=rng).to(nodes.device)
    root = root_above(rollout)[nodes[order]]
    rank, _ = rank_within(torch.arange(len(nodes), device=nodes.device), root)
    return nodes[order[rank == 0].sort().values]


def relative_change(rollout: Rollout) -> Tensor:
    """Return ``rho(k) = |x_next - x|_1 / |x|_1``, averaged over the trained draws at step k -> [S]
    float64; NaN where there is none.

    Chunk-GRPO (2510.21583) divides the steps into chunks by it.
    """
    made, mine = drawn_at(rollout.tree), trained_draws(rollout)
    change = relative_changes(rollout)
    return torch.stack([change[mine & (made == k)].mean() for k in range(len(rollout.sigmas) - 1)])


def relative_changes(rollout: Rollout) -> Tensor:
    """Return ``|x_next - x|_1 / |x|_1`` of each trained draw [V] float64; NaN for the other
    nodes. A rollout that keeps them is not asked for its latents."""
    if rollout.change is not None:
        return rollout.change
    made, mine = drawn_at(rollout.tree), trained_draws(rollout)
    change = torch.full(made.shape, torch.nan, dtype=torch.float64, device=made.device)
    for k in range(
        len(rollout.sigmas) - 1
    ):  # step by step: a copy of all latents at once would be large
        node = (mine & (made == k)).nonzero().flatten()
        x, x_next = rollout.x[rollout.tree.parent[node]].float(), rollout.x[node].float()
        change[node] = (x_next - x).abs().flatten(1).sum(1).double() / x.abs().flatten(1).sum(1)
    return change
