"""Which nodes of a forest are trained, what is known of each, and how they are dealt out to
optimizer steps and network calls, over all processes alike. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.forest import merge, state_rows
from flowrl.algorithms.selection._change import relative_changes
from flowrl.core.devices import remember
from flowrl.core.processes import World
from flowrl.core.types import Rollout, StateRows, Tree


class Minibatch(NamedTuple):
    """The trained nodes of one optimizer step, unit by unit."""

    node: Tensor  # [N] int64
    place: Tensor  # [N] int64, ascending: nodes of one place stay together


class NetworkCall(NamedTuple):
    """The trained nodes that go through the network together."""

    node: Tensor  # [B] int64
    rows: StateRows  # which of them share a state


def deal(
    rollout: Rollout,
    nodes: Tensor,
    *,
    unit: Tensor,
    updates: int,
    order: Literal["random", "step"],
    generator: torch.Generator,
) -> list[Minibatch]:
    """Deal nodes [N] out to at most `updates` optimizer steps of about equal size, in units.

    unit [N] int64: nodes with one id stay together, such as the decisions of a segment, or those
    drawn from one state, which share its network pass. order "random" shuffles the units; "step"
    takes the noisiest first, shuffled within a step, so that with as many updates as trained steps
    each update is one step's (G2RPO).
    """
    units, index = torch.unique(unit, return_inverse=True)
    place = torch.randperm(len(units), generator=generator)
    if order == "step":
        step = torch.full((len(units),), len(rollout.sigmas), device=nodes.device)
        step = step.scatter_reduce(0, index, rollout.tree.step[nodes], "amin").cpu()
        ranked = torch.argsort(step * len(units) + place)
        place = torch.empty_like(place).scatter(0, ranked, torch.arange(len(units)))
    at, row = torch.sort(place.to(nodes.device)[index], stable=True)
    # as many parts as there can be, whose sizes differ by one unit at most; empty ones are left out
    part = at * min(updates, len(units)) // max(1, len(units))
    sizes = torch.bincount(part).tolist()
    dealt = []
    for node, there in zip(nodes[row].split(sizes), at.split(sizes), strict=True):
        if len(node):
            dealt.append(Minibatch(node, there))
    return dealt


def cut(part: Minibatch, state: Tensor, size: int) -> list[NetworkCall]:
    """Cut a minibatch into network calls of at most `size` states each.

    state [N] int64: the state of each node, which is one row of the network for all nodes of a
    call. A larger unit is a call of its own. All is counted on the host before the first call, so
    that the host need not wait for the device between two of them.
    """
    if not len(part.node):
        return []
    node, place, state = part.node.cpu(), part.place.cpu(), state.cpu()
    unit = torch.unique_consecutive(place, return_inverse=True)[1]
    pairs = torch.unique(torch.stack([unit, state]), dim=1)
    shared = len(torch.unique(pairs[1])) < pairs.shape[1]
    call = torch.tensor(_calls_shared(pairs, size) if shared else _calls(pairs, size))[unit]
    order = torch.argsort(call, stable=True)
    device, calls = part.node.device, []
    for at in order.split(torch.bincount(call).tolist()):
        first, index = state_rows(state[at])
        moved = StateRows(first.to(device, non_blocking=True), index.to(device, non_blocking=True))
        there = node[at].to(device, non_blocking=True)
        calls.append(NetworkCall(remember(there, node[at]), moved))
    return calls


def _calls(pairs: Tensor, size: int) -> list[int]:
    """Number the call of each unit; pairs [2, P]: unit and state, each state of one unit."""
    call: list[int] = []
    filled = size
    for states in torch.bincount(pairs[0]).tolist():
        new = filled + states > size
        filled = states if new else filled + states
        call.append(call[-1] + new if call else 0)
    return call


def _calls_shared(pairs: Tensor, size: int) -> list[int]:
    """Number the call of each unit as `_calls`, where units share states: those that do stand
    together, and a state counts once per call."""
    states: list[set[int]] = [set() for _ in range(int(pairs[0].max()) + 1)]
    for one, state in pairs.T.tolist():
        states[one].add(state)
    call, filled = [0] * len(states), set[int]()
    for one in sorted(range(len(states)), key=lambda k: min(states[k])):
        last = max(call)
        new = bool(filled) and len(filled | states[one]) > size
        filled = states[one] if new else filled | states[one]
        call[one] = last + new
    return call


# ------------------------------------------------------------------- of all processes together


class SharedForest(NamedTuple):
    """The forest of all processes, on the CPU if there are several; one process' own is the
    whole."""

    whole: Rollout  # latents [V, 0]; means and conditioning stay with the process that has them
    # [v] int64  the place in it of each node of this process; None: all are its own
    place: Tensor | None = None
    # [L] int64  the order that its leaves take, from those of all processes in turn
    leaf: Tensor | None = None

    def own(self, rows: Tensor, like: Rollout) -> Tensor:
        """Pick this process' part [v] of rows [V] about nodes, on the device of its own rollout."""
        return rows if self.place is None else rows[self.place].to(like.x.device)

    def numbered(self, nodes: Tensor, like: Rollout) -> Tensor:
        """Number nodes [B] of the whole as in this process' own rollout -> [B]; -1 = another
        process has it."""
        if self.place is None:
            return nodes
        nobody = torch.full((len(self.whole.tree.parent) + 1,), -1)
        mine = nobody.scatter(0, self.place, torch.arange(len(self.place)))
        return mine[nodes.cpu()].to(like.x.device)

    def own_part(self, part: Minibatch, like: Rollout) -> Minibatch:
        """Pick this process' nodes of an optimizer step, numbered as in its own rollout."""
        if self.place is None:
            return part
        node = self.numbered(part.node, like)
        return Minibatch(node[node >= 0], part.place.to(node.device)[node >= 0])


class NodeTable(NamedTuple):
    """What training knows of the nodes of a rollout besides their latents, [V] each."""

    advantage: Tensor  # float32
    factor: Tensor  # float32  of the node's loss; 0 = not trained
    segment: Tensor | None = None  # int64  nodes with one id move as one action
    # what parts know of nodes, for what a loss asks for; one named in NODES holds numbers of nodes
    facts: Mapping[str, Tensor] = {}

    def own(self, forest: SharedForest, like: Rollout) -> NodeTable:
        """Pick what is about this process' nodes; numbers of nodes are those of its own rollout."""
        if forest.place is None:
            return self
        segment = None if self.segment is None else forest.own(self.segment, like)
        facts = {}
        for name, rows in self.facts.items():
            mine = forest.own(rows, like)
            facts[name] = forest.numbered(mine, like) if name in NODES else mine
        advantage, factor = forest.own(self.advantage, like), forest.own(self.factor, like)
        return NodeTable(advantage, factor, segment, facts)


NODES = ("best",)
ON_HOST = ("log_prob", "noise_scale", "leaf", "sigmas", "group_ids", "twin", "block", "change")


def join(world: World, rollout: Rollout) -> SharedForest:
    """Join the forests of all processes, as one process would have sampled them; a prompt never
    crosses a process."""
    if world.size == 1:
        return SharedForest(rollout)
    # latents stay: what depends on them is computed here
    ro = rollout._replace(change=relative_changes(rollout))
    on_host: dict[str, Any] = {
        "tree": Tree(*(rows.cpu() for rows in ro.tree)),
        "x": torch.zeros(len(ro.tree.parent), 0),
    }
    for name in ON_HOST:
        rows = getattr(ro, name)
        on_host[name] = None if rows is None else rows.cpu()
    parts = world.gather(ro._replace(**on_host, cond={}, mean=None))
    # the whole, and this process' part of it
    whole, place, leaf = merge(parts)
    first = sum(len(part.x) for part in parts[: world.rank])
    return SharedForest(whole, place[first : first + len(ro.tree.parent)], leaf)
