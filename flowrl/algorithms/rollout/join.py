"""Join the forests of several sampling passes into the one that all prompts at once would have
given."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout, Tree, concatenated

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
