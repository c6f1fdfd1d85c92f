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
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.tree.parent))
    # Nodes that were made together stand together: within them by prompt, and in the order of their
    # own part.
    made = _cat([part.block for part in parts]) * MOST_PROMPTS
    key = made + torch.cat([part.tree.group for part in parts])
    order = torch.argsort(key, stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))

    def moved(ids: list[Tensor]) -> Tensor:
        pairs = zip(ids, starts, strict=False)
        return torch.cat([torch.where(n < 0, -1, place[n.clamp_min(0) + at]) for n, at in pairs])

    columns = zip(*(part.tree[1:] for part in parts), strict=True)
    tree = Tree(
        moved([part.tree.parent for part in parts])[order],
        *(torch.cat(rows)[order] for rows in columns),
    )
    log_prob = torch.cat([part.log_prob for part in parts])[order]
    noise_scale = torch.cat([part.noise_scale for part in parts])[order]
    x = _joined([part.x for part in parts], starts, place)
    leaf = moved([part.leaf for part in parts])
    block, key = _cat([part.block for part in parts])[order], key[order]
    seen = torch.argsort(key[leaf], stable=True)
    cond = concatenated([part.cond for part in parts])
    ids = torch.cat([part.group_ids for part in parts])
    means = [part.mean for part in parts]
    mean = None if first.mean is None else _joined([*map(_known, means)], starts, place)
    twin = None if first.twin is None else moved([_known(part.twin) for part in parts])[order]
    change = None if first.change is None else _cat([part.change for part in parts])[order]
    whole = Rollout(
        tree,
        x,
        log_prob,
        noise_scale,
        leaf[seen],
        first.sigmas,
        cond,
        ids,
        mean,
        twin,
        block,
        change,
    )
    return whole, place, seen


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


def _joined(parts: list[Tensor], starts: list[int], place: Tensor) -> Tensor:
    """Put latents of parts, each [v, *] of nodes from a start on, in their places -> [V, *]: the
    only copy that is made."""
    out = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    for part, at in zip(parts, starts, strict=False):
        out[place[at : at + len(part)].to(out.device)] = part
    return out


def _cat(rows: list[Tensor | None]) -> Tensor:
    return torch.cat([_known(row) for row in rows])


def _known(row: Tensor | None) -> Tensor:
    if row is None:
        raise ConfigError("only rollouts of `rollout`, and all alike, can be merged")
    return row
