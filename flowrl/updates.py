"""Deal the decisions of an iteration out to optimizer steps, and those to network calls. Pure index arithmetic."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.batches import states_of
from flowrl.types import Rollout


class Share(NamedTuple):
    """The decisions of one optimizer step, or of one network call, unit by unit."""

    node: Tensor  # [B] int64
    place: Tensor  # [B] int64, ascending: decisions of one place stay together


def deal(
    rollout: Rollout,
    nodes: Tensor,
    *,
    segment: Tensor | None,
    updates: int,
    order: Literal["random", "step"],
    generator: torch.Generator,
) -> list[Share]:
    """Deal decisions [B] out to at most `updates` optimizer steps of about equal size, in units.

    A unit is what must stay together: the decisions of one segment [V], or else those drawn from one state, because
    they share its network pass. order "random" shuffles the units; "step" takes the noisiest first, shuffled within
    a step, so that with as many updates as trained steps each update is one step's (G2RPO).
    """
    tree = rollout.tree
    key = states_of(rollout, nodes) if segment is None else segment[nodes]
    units, index = torch.unique(key, return_inverse=True)
    place = torch.randperm(len(units), generator=generator)
    if order == "step":
        step = torch.full((len(units),), len(rollout.sigmas), device=nodes.device)
        step = step.scatter_reduce(0, index, tree.step[tree.parent[nodes]], "amin").cpu()
        ranked = torch.argsort(step * len(units) + place)
        place = torch.empty_like(place).scatter(0, ranked, torch.arange(len(units)))
    at, row = torch.sort(place.to(nodes.device)[index], stable=True)
    return _split_by(nodes[row], at, -(-len(units) // updates))


def cut(rollout: Rollout, share: Share, size: int) -> list[Tensor]:
    """Cut a share into network calls of at most `size` states each -> nodes; a larger unit is a call of its own."""
    if not len(share.node):
        return []
    unit = torch.unique_consecutive(share.place, return_inverse=True)[1]
    pairs = torch.unique(torch.stack([unit, states_of(rollout, share.node)]), dim=1)
    call: list[int] = []
    filled = size
    for states in torch.bincount(pairs[0]).tolist():
        new = filled + states > size
        filled = states if new else filled + states
        call.append(call[-1] + new if call else 0)
    calls = torch.tensor(call, device=unit.device)[unit]
    return list(share.node.split(torch.bincount(calls).tolist()))


def _split_by(nodes: Tensor, place: Tensor, size: int) -> list[Share]:
    """Cut nodes [B] of ascending places [B] wherever a place passes a multiple of `size`; leave out empty parts."""
    sizes = torch.bincount(place // size).tolist()
    return [Share(n, p) for n, p in zip(nodes.split(sizes), place.split(sizes), strict=True) if len(n)]
