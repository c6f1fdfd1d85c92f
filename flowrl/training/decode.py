"""Images of an iteration: decoded a few at a time, kept as bytes on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.rollout.join import leaf_places
from flowrl.core.pixels import to_bytes
from flowrl.core.types import Latents, RewardBatch, Rollout
from flowrl.training.checks import check_images, check_latents
from flowrl.training.setup import Setup


class ImageBuffer:
    """The images of this process' prompts, uint8 [L, 3, H, W], or videos [L, T, 3, H, W], on the
    host, in the order of the merged rollout's leaves.

    On the model's device there are never more than one call's images.
    """

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.levels: Tensor | None = None

    @torch.no_grad()
    def decode(self, run: Setup, ro: Rollout, rows: list[int], *, first: int) -> Tensor:
        """Decode the leaves of a part whose prompts begin at the `first` of this process -> their
        places [l].

        Leaves with one latent are decoded once. Raises RunError for what is not finite.
        """
        texts = [run.train_set.texts[row] for row in rows]
        check_latents(ro, texts, run.iteration)
        place = leaf_places(ro, first=first, prompts=self.prompts)
        node, same = distinct_leaves(ro)
        size = int(run.config.model.kwargs.get("decode_batch", run.config.train.rollout_batch))
        for start in range(0, len(node), size):
            some = node[start : start + size]
            mine = (same >= start) & (same < start + size)
            levels = _decoded(run, ro, some, texts)
            room = self._room(levels, len(place) // len(ro.group_ids))
            room[place[mine]] = levels[same[mine] - start]
            del levels
            run.progress(min(start + size, len(node)), len(node))
        return place

    def keep(self, ro: Rollout, levels: Tensor, *, first: int) -> Tensor:
        """Keep images [l, 3, H, W] that are there already, in the order of a part's leaves -> their
        places [l]."""
        place = leaf_places(ro, first=first, prompts=self.prompts)
        room = self._room(levels, len(place) // len(ro.group_ids))
        room[place] = levels
        return place

    def of(self, place: Tensor) -> Tensor:
        """Return the images [l, 3, H, W] at places [l]. Raises IndexError before any was
        decoded."""
        if self.levels is None:
            raise IndexError("no image was decoded yet")
        whole = len(place) == len(self.levels)
        return self.levels if whole else self.levels[place]

    def _room(self, like: Tensor, per_prompt: int) -> Tensor:
        if self.levels is None:
            count = per_prompt * self.prompts
            self.levels = torch.empty(count, *like.shape[1:], dtype=torch.uint8)
        return self.levels


def _decoded(run: Setup, ro: Rollout, nodes: Tensor, texts: list[str]) -> Tensor:
    """Decode leaves [B] -> uint8 [B, 3, H, W] on the host. Nothing of it stays on the device."""
    images = run.model.decode(ro.x[nodes].float())
    check_images(ro, nodes, images, texts, run.iteration)
    return to_bytes(images).cpu()


def distinct_leaves(ro: Rollout) -> tuple[Tensor, Tensor]:
    """List one leaf per latent -> nodes [d], and for each leaf which of them is its own [l] on the
    host."""
    if ro.twin is None:
        return ro.leaf, torch.arange(len(ro.leaf))
    leaf, first = ro.leaf.cpu(), ro.twin[ro.leaf].cpu()
    node = leaf[first == leaf]
    number = torch.full((len(ro.tree.parent),), -1)
    number[node] = torch.arange(len(node))
    return node.to(ro.leaf.device), number[first]


def first_of(batch: RewardBatch, same: Tensor) -> RewardBatch:
    """Keep the first image of each number in `same` [L]."""
    # nothing to leave out where all differ
    count = int(same.max()) + 1
    if count == len(same):
        return batch
    # the first row of each number, in the order of the numbers
    place = torch.arange(len(same))
    rows = torch.full((count,), len(same)).scatter_reduce(0, same, place, "amin")
    prompts = [batch.prompts[i] for i in rows.tolist()]
    meta = [batch.meta[i] for i in rows.tolist()]
    group = batch.group[rows.to(batch.group.device)]
    sources = [batch.source[i] for i in rows.tolist()] if batch.source else []
    seen = RewardBatch(batch.images[rows], prompts, group, meta, batch.sigma[rows], sources)
    if batch.latents is None:
        return seen
    # latents may lie on another device than the images
    x0, cond, states = batch.latents
    there = rows.to(x0.device)
    mine = {name: value[there] for name, value in cond.items()}
    states = None if states is None else states[there]
    return seen._replace(latents=Latents(x0[there], mine, states))
