"""Arithmetic on forests: which nodes are trained and where their rows stand, what rewards are worth
up the forest, and how several forests become one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import vp_from_flow, wide
from flowrl.core.types import Rollout, StateRows, Tree, concatenated

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


def decision_nodes(rollout: Rollout) -> Tensor:
    """List the nodes that were made by a draw -> [N] int64, in the order of the rollout.

    Draws of the last denoising step are left out: their noise stays in the image, and published
    code does not train them (Flow-GRPO: the first ``int(0.99 steps)``).
    """
    tree = rollout.tree
    return ((tree.std > 0) & (tree.step < len(rollout.sigmas) - 1)).nonzero().flatten()


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
    cond = {}
    for name, value in rollout.cond.items():
        cond[name] = value[row]
    return cond


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


# ------------------------------------------------------------- what rewards are worth up the forest


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
    group = torch.unique(torch.stack(keys).long(), dim=1, return_inverse=True)[1]
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


# --------------------------------------------------------------------------- several forests as one


MOST_PROMPTS = 2**32  # an id of a prompt is below


def merge(parts: list[Rollout]) -> tuple[Rollout, Tensor, Tensor]:
    """Join rollouts of one plan, each of prompts of its own, into the one that all prompts at once
    would have given. `cond` and `group_ids` are those of the parts, one after the other.

    Returns the rollout; the new number of each node [V], part after part; and the order [L] in
    which leaves of the parts, one after the other, stand in it.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, torch.arange(len(first.tree.parent)), torch.arange(len(first.leaf))
    joined = _Columns(parts)
    # Nodes that were made together stand together: within them by prompt, and in the order of their
    # own part.
    key = joined.rows("block") * MOST_PROMPTS + joined.of_trees("group")
    order = torch.argsort(key, stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    leaf = joined.moved([part.leaf for part in parts], place)
    seen = torch.argsort(key[order][leaf], stable=True)
    # every field, in that order; those that the parts lack are not there either
    tree = Tree(
        parent=joined.moved([part.tree.parent for part in parts], place)[order],
        step=joined.of_trees("step")[order],
        std=joined.of_trees("std")[order],
        group=joined.of_trees("group")[order],
    )
    mean = twin = change = None
    if first.mean is not None:
        mean = joined.latents([_known(part.mean) for part in parts], place)
    if first.twin is not None:
        twin = joined.moved([_known(part.twin) for part in parts], place)[order]
    if first.change is not None:
        change = joined.rows("change")[order]
    whole = Rollout(
        tree=tree,
        x=joined.latents([part.x for part in parts], place),
        log_prob=joined.rows("log_prob")[order],
        noise_scale=joined.rows("noise_scale")[order],
        leaf=leaf[seen],
        sigmas=first.sigmas,
        cond=concatenated([part.cond for part in parts]),
        group_ids=joined.rows("group_ids"),
        mean=mean,
        twin=twin,
        block=joined.rows("block")[order],
        change=change,
    )
    return whole, place, seen


class _Columns:
    """The fields of parts, one after the other."""

    def __init__(self, parts: list[Rollout]) -> None:
        self.parts = parts
        self.starts = [0]  # the number of each part's first node
        for part in parts:
            self.starts.append(self.starts[-1] + len(part.tree.parent))

    def rows(self, field: str) -> Tensor:
        """Join a field that has a row for each node, or prompt. Raises ConfigError without it."""
        return torch.cat([_known(getattr(part, field)) for part in self.parts])

    def of_trees(self, field: str) -> Tensor:
        """Join a field of the trees."""
        return torch.cat([getattr(part.tree, field) for part in self.parts])

    def moved(self, ids: list[Tensor], place: Tensor) -> Tensor:
        """Join node ids of the parts as the new numbers of these nodes, `place` [V]; -1 stays."""
        found = []
        for own, start in zip(ids, self.starts, strict=False):
            found.append(torch.where(own < 0, -1, place[own.clamp_min(0) + start]))
        return torch.cat(found)

    def latents(self, latents: list[Tensor], place: Tensor) -> Tensor:
        """Put latents of the parts, each [v, *] of its first nodes, in their places -> [V, *]: the
        only copy that is made."""
        out = latents[0].new_empty(sum(map(len, latents)), *latents[0].shape[1:])
        for own, start in zip(latents, self.starts, strict=False):
            out[place[start : start + len(own)].to(out.device)] = own
        return out


def of_prompt(rollout: Rollout, group: int) -> Rollout:
    """Cut one prompt's forest out of a rollout; `merge` of all prompts' gives it back."""
    # this prompt's nodes [n], and the new number of each old node [V], -1 elsewhere
    node = (rollout.tree.group == group).nonzero().flatten()
    number = torch.full_like(rollout.tree.parent, -1)
    number = number.scatter(0, node, torch.arange(len(node), device=node.device))

    def moved(ids: Tensor) -> Tensor:
        return torch.where(ids < 0, -1, number[ids.clamp_min(0)])

    def rows(values: Tensor | None) -> Tensor | None:
        """Pick a prompt's nodes; those of leaves may be gone."""
        return None if values is None else values[node[node < len(values)]]

    tree = rollout.tree
    # the conditioning has a row per prompt, all else one per node
    mine = (rollout.group_ids == group).nonzero().flatten()
    twin = rows(rollout.twin)
    return rollout._replace(
        tree=Tree(moved(tree.parent[node]), tree.step[node], tree.std[node], tree.group[node]),
        x=_known(rows(rollout.x)),
        log_prob=rollout.log_prob[node],
        noise_scale=rollout.noise_scale[node],
        leaf=moved(rollout.leaf[tree.group[rollout.leaf] == group]),
        cond={name: row[mine.to(row.device)] for name, row in rollout.cond.items()},
        group_ids=rollout.group_ids[mine],
        mean=rows(rollout.mean),
        twin=None if twin is None else moved(twin),
        block=rows(rollout.block),
        change=rows(rollout.change),
    )


def without_leaves(rollout: Rollout) -> Rollout:
    """Drop the latents of the leaves, which are the last nodes; everything else stays."""
    inner = len(rollout.tree.parent) - len(rollout.leaf)
    mean = rollout.mean
    return rollout._replace(
        x=rollout.x[:inner].clone(), mean=None if mean is None else mean[:inner].clone()
    )


def leaf_places(rollout: Rollout, *, first: int, prompts: int) -> Tensor:
    """Say where the leaves of a part stand among those of all `prompts` prompts -> [l] on the host.

    The part has consecutive prompts, the `first` one of them at that place. Leaves that were made
    together stand together, prompt after prompt, as `merge` puts them. Raises ConfigError for a
    rollout that `rollout` did not make.
    """
    mine = len(rollout.group_ids)
    if rollout.block is None:
        raise ConfigError("only rollouts of `rollout` can be parts of an iteration")
    block = rollout.block[rollout.leaf].cpu()
    size = torch.unique(block, return_inverse=True, return_counts=True)
    which, count = size[1], size[2] // mine  # of a block, per prompt
    before = (count.cumsum(0) - count)[which]
    inside = torch.arange(len(block)) - before * mine
    return before * prompts + first * count[which] + inside


def _known(row: Tensor | None) -> Tensor:
    if row is None:
        raise ConfigError("only rollouts of `rollout`, and all alike, can be merged")
    return row
