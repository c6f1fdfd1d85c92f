"""What each process holds of an iteration: all of the forest's shape, and its own prompts' latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.credit.choices import changes
from flowrl.dist import World
from flowrl.samplers.rollout import merge
from flowrl.types import RewardBatch, Rollout, Tree
from flowrl.updates import Share


class Held(NamedTuple):
    """The forest of all processes, on the CPU if there are several; one process' own is the whole."""

    whole: Rollout  # latents [V, 0], means and conditioning stay with the process that has them
    place: Tensor | None = None  # [v] int64  the place in it of each node of this process; None: all are its own
    leaf: Tensor | None = None  # [L] int64  the order that its leaves take, from those of all processes in turn

    def own(self, rows: Tensor, like: Rollout) -> Tensor:
        """Pick this process' part [v] of rows [V] about nodes, on the device of its own rollout."""
        return rows if self.place is None else rows[self.place].to(like.x.device)

    def numbered(self, nodes: Tensor, like: Rollout) -> Tensor:
        """Number nodes of the whole as in this process' own rollout; -1 = another process has it."""
        if self.place is None:
            return nodes
        mine = torch.full((len(self.whole.x) + 1,), -1).scatter(0, self.place, torch.arange(len(self.place)))
        return mine[nodes].to(like.x.device)

    def own_share(self, share: Share, like: Rollout) -> Share:
        """Pick this process' decisions of an optimizer step, numbered as in its own rollout."""
        node = self.numbered(share.node, like)
        return Share(node[node >= 0], share.place.to(node.device)[node >= 0])


class Facts(NamedTuple):
    """What training knows of the nodes of a rollout, [V] each."""

    weight: Tensor  # float32  credit
    factor: Tensor  # float32  of the decision's loss; 0 = not trained
    segment: Tensor | None  # int64  decisions with one id move as one action
    best: Tensor | None  # int64  the best leaf below, where the loss asks for it

    def own(self, held: Held, like: Rollout) -> Facts:
        """Pick what is about this process' nodes; `best` is numbered as in its own rollout."""
        segment = None if self.segment is None else held.own(self.segment, like)
        best = None if self.best is None else held.numbered(held.own(self.best, like).cpu(), like)
        return Facts(held.own(self.weight, like), held.own(self.factor, like), segment, best)


def join(world: World, rollout: Rollout) -> Held:
    """Join the forests of all processes, as one process would have sampled them; a prompt never crosses a process."""
    if world.size == 1:
        return Held(rollout)
    ro = rollout
    on_host: dict[str, Any] = {"tree": Tree(*(rows.cpu() for rows in ro.tree)), "x": torch.zeros(len(ro.x), 0)}
    ro = ro._replace(change=changes(ro))
    for name in ("log_prob", "level", "leaf", "sigmas", "group_ids", "twin", "block", "change"):
        rows = getattr(ro, name)
        on_host[name] = None if rows is None else rows.cpu()
    parts = world.gather(ro._replace(**on_host, cond={}, mean=None))
    whole, place, leaf = merge(parts)
    first = sum(len(part.x) for part in parts[: world.rank])
    return Held(whole, place[first : first + len(ro.x)], leaf)


def join_pictures(world: World, batch: RewardBatch) -> Tensor:
    """Return the pictures of all processes in turn [L, 3, H, W], of 256 levels each, on this process' device."""
    small = (batch.images * 255).round().to(torch.uint8).cpu()
    return torch.cat(world.gather(small)).to(batch.images.device).float() / 255
