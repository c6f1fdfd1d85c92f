"""Forests as the plans leave them, without a model: nodes are numbered block by block, in the
engine's order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from flowrl.core.types import Tree

Forest = tuple[Tree, Tensor]  # tree, leaf [L]
NOISE = 0.5  # std of every decision


class Grower:
    """Add blocks of nodes; `live` is the frontier."""

    def __init__(self, groups: int, size: int) -> None:
        self.parent: list[int] = []
        self.step: list[int] = []
        self.std: list[float] = []
        self.group: list[int] = []
        self.leaf: list[int] = []
        self.live: list[int] = []
        for g in range(groups):
            for _ in range(size):
                self.live.append(self._one(-1, 0, 0.0, g))

    def under(self, parents: Sequence[int], step: int, std: float, copies: int = 1) -> list[int]:
        """Add `copies` children under each of parents -> their ids."""
        return [self._one(p, step, std, self.group[p]) for p in parents for _ in range(copies)]

    def done(self) -> Forest:
        """Lay out the nodes as the engine stores them: clean ones stand behind all others."""
        end = max(self.step)
        order = sorted(range(len(self.step)), key=lambda v: self.step[v] == end)
        new = {old: place for place, old in enumerate(order)} | {-1: -1}
        tree = Tree(
            torch.tensor([new[self.parent[v]] for v in order]),
            torch.tensor([self.step[v] for v in order]),
            torch.tensor([self.std[v] for v in order]),
            torch.tensor([self.group[v] for v in order]),
        )
        return tree, torch.tensor([new[v] for v in self.leaf])

    def _one(self, parent: int, step: int, std: float, group: int) -> int:
        self.parent.append(parent)
        self.step.append(step)
        self.std.append(std)
        self.group.append(group)
        return len(self.parent) - 1


def tree(
    groups: int,
    size: int,
    steps: int,
    splits: Sequence[int] = (),
    *,
    branch: int = 2,
    ode_last: int = 0,
) -> Forest:
    """Noise at every step but the last `ode_last`; every live node has `branch` children at
    `splits`."""
    grow = Grower(groups, size)
    for k in range(steps - ode_last):
        grow.live = grow.under(grow.live, k + 1, NOISE, branch if k in splits else 1)
    grow.leaf = grow.live if not ode_last else grow.under(grow.live, steps, 0.0)
    return grow.done()


def by_hand(
    parent: Sequence[int],
    step: Sequence[int],
    std: Sequence[float] | None = None,
    group: Sequence[int] | None = None,
) -> Tree:
    """Make a tree of lists; without others every child is drawn, and all is one prompt's."""
    above = torch.tensor(parent)
    noise = (above >= 0).float() if std is None else torch.tensor(std)
    prompt = torch.zeros_like(above) if group is None else torch.tensor(group)
    return Tree(above, torch.tensor(step), noise, prompt)


def chain(groups: int, size: int, steps: int, *, ode_last: int = 0) -> Forest:
    """Noise at every step but the last `ode_last`, no forks: one leaf per root."""
    return tree(groups, size, steps, ode_last=ode_last)


def rake(
    groups: int,
    size: int,
    steps: int,
    branch: int,
    *,
    low: int = 0,
    high: int | None = None,
    strides: Sequence[int] = (1,),
) -> Forest:
    """A trunk without noise; under its nodes of steps ``[low, high)`` `branch` decisions, each with
    a leaf a stride."""
    grow = Grower(groups, size)
    for k in range(low, steps if high is None else high):
        if k:
            grow.live = grow.under(grow.live, k, 0.0)
        drawn = grow.under(grow.live, k + 1, NOISE, branch)
        for _ in strides:
            grow.leaf += grow.under(drawn, steps, 0.0) if k + 1 < steps else []
        grow.leaf += drawn if k + 1 == steps else []
    return grow.done()


def comb(
    groups: int,
    size: int,
    steps: int,
    window: int,
    *,
    preview: Literal["full", "x0"] = "full",
    baseline: bool = True,
    flat_end: bool = False,
) -> Forest:
    """One chain of `window` decisions per root, with previews; "x0" hangs one under the last
    decision as well.

    flat_end: the draw into step `steps` has std 0, as with CPS, so it is no decision.
    """
    grow = Grower(groups, size)
    if baseline:
        grow.leaf += grow.under(grow.live, steps, 0.0)
    for k in range(window):
        last = k + 1 == steps
        grow.live = grow.under(grow.live, k + 1, 0.0 if last and flat_end else NOISE)
        if not last and (preview == "x0" or k + 1 < window):
            grow.leaf += grow.under(grow.live, steps, 0.0)
    grow.leaf += grow.live if window == steps else grow.under(grow.live, steps, 0.0)
    return grow.done()


def reordered(forest: Forest, seed: int) -> tuple[Forest, Tensor, Tensor]:
    """Shuffle the samples and the leaf list -> forest, new id of each old node [V], old place of
    each new leaf [L].

    A sample's nodes become one block and keep their order, so that siblings do too.
    """
    (parent, step, std, group), leaf = forest
    roots: list[int] = []
    for v, p in enumerate(parent.tolist()):
        roots.append(v if p < 0 else roots[p])
    rng = random.Random(seed)
    rank = {root: rng.random() for root in sorted(set(roots))}
    old = torch.tensor(sorted(range(len(roots)), key=lambda v: (rank[roots[v]], v)))
    new = torch.empty_like(old)
    new[old] = torch.arange(len(old))
    above = torch.where(parent[old] < 0, -1, new[parent[old].clamp_min(0)])
    place = torch.tensor(rng.sample(range(len(leaf)), len(leaf)))
    return (Tree(above, step[old], std[old], group[old]), new[leaf][place]), new, place


@st.composite
def random_forest(draw: Callable[..., Any], *, most: int = 24) -> Forest:
    """Draw any forest: forks, long edges and edges without noise anywhere; every node without
    children is a leaf."""
    rng = random.Random(draw(st.integers(0, 2**31)))
    groups = draw(st.integers(1, 3))
    roots = groups * draw(st.integers(1, 2))
    parent, step = [-1] * roots, [0] * roots
    std, group = [0.0] * roots, [r % groups for r in range(roots)]
    for v in range(roots, draw(st.integers(roots, most))):
        above = rng.randrange(v)
        parent.append(above)
        step.append(step[above] + rng.randint(1, 3))
        std.append(rng.choice([0.0, 0.3, 0.9]))
        group.append(group[above])
    leaf = torch.tensor([v for v in range(len(parent)) if v not in parent])
    return Tree(
        torch.tensor(parent), torch.tensor(step), torch.tensor(std), torch.tensor(group)
    ), leaf


@st.composite
def random_rake(draw: Callable[..., Any]) -> tuple[Forest, dict[str, Any]]:
    """Draw a rake and the arguments that made it."""
    steps = draw(st.integers(1, 5))
    low = draw(st.integers(0, steps - 1))
    options = {
        "groups": draw(st.integers(1, 3)),
        "size": draw(st.integers(1, 2)),
        "steps": steps,
        "branch": draw(st.integers(1, 4)),
        "low": low,
        "high": draw(st.integers(low + 1, steps)),
        "strides": draw(st.sampled_from([(1,), (1, 2), (1, 2, 3)])),
    }
    return rake(**options), options


@st.composite
def random_comb(draw: Callable[..., Any]) -> tuple[Forest, dict[str, Any]]:
    """Draw a comb with a baseline and the arguments that made it."""
    flat_end = draw(st.booleans())
    steps = draw(st.integers(1 + flat_end, 6))
    options = {
        "groups": draw(st.integers(1, 3)),
        "size": draw(st.integers(1, 4)),
        "steps": steps,
        "window": draw(st.integers(1, steps)),
        "preview": draw(st.sampled_from(["full", "x0"])),
        "flat_end": flat_end,
    }
    return comb(**options), options


def edges(nodes: Tree, seed: int) -> Tensor:
    """Draw log-probs [V]; 0 on edges without noise, as in a rollout."""
    drawn = 3 * torch.randn(len(nodes.std), generator=torch.Generator().manual_seed(seed))
    return torch.where(nodes.std > 0, drawn, 0.0)


def rewards(count: int, seed: int, *, kinds: int = 0, missing: float = 0.0) -> Tensor:
    """Draw rewards [count] in [0, 1): all different, or from `kinds` values; a share `missing` is
    NaN."""
    rng = random.Random(seed)
    values = [rng.randrange(kinds) / kinds if kinds else rng.random() for _ in range(count)]
    return torch.tensor([float("nan") if rng.random() < missing else value for value in values])
