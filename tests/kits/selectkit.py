"""Small rollouts made by hand for the tests of segments and selections."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from flowrl.core.types import Rollout, SelectInput, Tree


def forest(
    branch: list[int],
    *,
    groups: list[int] | None = None,
    previews: bool = False,
    std: Tensor | None = None,
    seed: int = 0,
) -> Rollout:
    """Lay out nodes as the engine does: `branch[k]` draws per live node at step k, 0 = a step
    without noise.

    One root per entry of groups; a node is stored before and after each draw; previews hang a leaf
    under each draw. std [S] of the draws, else 1, 1/2, 1/3, ...; latents are random, 6 numbers
    each.
    """
    groups = groups or [0]
    rows = [(-1, 0, 0.0, group) for group in groups]  # parent, step, std, group
    live, leaves, steps = [*range(len(groups))], [], len(branch)
    for k, count in enumerate(branch):
        if not count:
            continue
        for place, node in enumerate(live):
            if rows[node][1] < k:
                rows.append((node, k, 0.0, rows[node][3]))
                live[place] = len(rows) - 1
        live = [node for node in live for _ in range(count)]
        for place, node in enumerate(live):
            rows.append(
                (node, k + 1, float(std[k]) if std is not None else 1 / (k + 1), rows[node][3])
            )
            live[place] = len(rows) - 1
        for node in live if previews and k + 1 < steps else []:
            rows.append((node, steps, 0.0, rows[node][3]))
            leaves.append(len(rows) - 1)
    for node in live:
        if rows[node][1] < steps:
            rows.append((node, steps, 0.0, rows[node][3]))
        leaves.append(node if rows[node][1] == steps else len(rows) - 1)
    parent, step, width, group = zip(*rows, strict=True)
    tree = Tree(torch.tensor(parent), torch.tensor(step), torch.tensor(width), torch.tensor(group))
    x = torch.randn(len(rows), 2, 3, generator=torch.Generator().manual_seed(seed)) + 2.0
    zero, sigmas = torch.zeros(len(rows)), torch.linspace(1, 0, steps + 1)
    return Rollout(tree, x, zero, zero, torch.tensor(leaves), sigmas, {}, torch.unique(tree.group))


def rake() -> Rollout:
    """One root, 3 steps: two draws with a leaf each under the root (1, 2) and under the trunk node
    5 (6, 7)."""
    parent, step = (
        torch.tensor([-1, 0, 0, 1, 2, 0, 5, 5, 6]),
        torch.tensor([0, 1, 1, 3, 3, 1, 2, 2, 3]),
    )
    std = torch.tensor([0, 1, 1, 0, 0, 0, 0.5, 0.5, 0])
    tree = Tree(parent, step, std, torch.zeros(9, dtype=torch.int64))
    zero, sigmas = torch.zeros(9), torch.linspace(1, 0, 4)
    return Rollout(
        tree, torch.ones(9, 2), zero, zero, torch.tensor([3, 4, 8]), sigmas, {}, torch.tensor([0])
    )


def choose(
    rollout: Rollout,
    *,
    weight: Tensor | None = None,
    segment: Tensor | None = None,
    iteration: int = 0,
    seed: int = 0,
) -> SelectInput:
    """Make a choice; weights are random unless given."""
    if weight is None:
        weight = torch.randn(len(rollout.x), generator=torch.Generator().manual_seed(seed + 1))
    return SelectInput(rollout, weight, segment, iteration, torch.Generator().manual_seed(seed))


def draws(rollout: Rollout) -> list[int]:
    """List the trained draws, by the definition."""
    last, tree = len(rollout.sigmas) - 1, rollout.tree
    return [v for v in range(len(tree.std)) if tree.std[v] > 0 and tree.step[v] < last]


def step_of(rollout: Rollout, node: int) -> int:
    """Return the denoising step that a draw was made at."""
    return int(rollout.tree.step[rollout.tree.parent[node]])


def path(rollout: Rollout, node: int) -> list[int]:
    """List the nodes from `node` up to its root."""
    out = [node]
    while (node := int(rollout.tree.parent[node])) >= 0:
        out.append(node)
    return out


# steps without noise, draws and forks in any order, at least one draw that is trained
branches = st.lists(st.integers(0, 2), min_size=2, max_size=7).filter(lambda b: any(b[:-1]))
forests = st.builds(
    forest,
    branches,
    groups=st.sampled_from([[0], [0, 0, 1], [3, 1, 3]]),
    previews=st.booleans(),
    seed=st.integers(0, 99),
)
