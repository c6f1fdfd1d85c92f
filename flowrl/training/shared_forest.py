"""What each process holds of an iteration: all of the forest's shape, and its own prompts'
latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.rollout.join import merge
from flowrl.algorithms.selection._change import relative_changes
from flowrl.core.processes import World
from flowrl.core.types import Rollout, Tree
from flowrl.training.minibatches import Minibatch


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
        node = self.numbered(part.node, like)
        return Minibatch(node[node >= 0], part.place.to(node.device)[node >= 0])


class NodeTable(NamedTuple):
    """What training knows of the nodes of a rollout besides their latents, [V] each."""

    advantage: Tensor  # float32
    factor: Tensor  # float32  of the node's loss; 0 = not trained
    segment: Tensor | None  # int64  nodes with one id move as one action
    best: Tensor | None  # int64  the best leaf below, where the loss needs it
    gate: Tensor | None = None  # float32  factor of the penalty; None = 1
    variance: Tensor | None = None  # float64  of the rewards of the node's prompt
    siblings: Tensor | None = None  # int64  trained nodes of the node's prompt
    scored: Tensor | None = None  # bool  nodes that the rewards judged; None = all

    def own(self, forest: SharedForest, like: Rollout) -> NodeTable:
        """Pick what is about this process' nodes; `best` is numbered as in its own rollout."""
        segment, best = self.segment, self.best
        if segment is not None:
            segment = forest.own(segment, like)
        if best is not None:
            best = forest.numbered(forest.own(best, like), like)
        advantage, factor = forest.own(self.advantage, like), forest.own(self.factor, like)
        gate = None if self.gate is None else forest.own(self.gate, like)
        variance = None if self.variance is None else forest.own(self.variance, like)
        count = None if self.siblings is None else forest.own(self.siblings, like)
        scored = None if self.scored is None else forest.own(self.scored, like)
        return NodeTable(advantage, factor, segment, best, gate, variance, count, scored)


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
