"""Images that were there before the run, in place of those that a model samples."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.pixels import from_bytes
from flowrl.core.prompts import PromptSet
from flowrl.core.types import FlowModel, Plan, Rollout, Tree
from flowrl.evaluation.preference_pairs import PreferencePair, load_pairs, read_pair
from flowrl.evaluation.sources import encode_rows


@runtime_checkable
class EncodesImages(Protocol):
    """A model that has a way back from images to latents."""

    def latents(self, images: Tensor) -> Tensor:
        """Return latents [B, *] of images [B, 3, H, W] in [0, 1], such that `decode` gives about
        the same images."""
        ...


def check_stored(plan: Plan, *, group: int, trains: str) -> None:
    """Raise ConfigError unless a method can train on the two stored images of each prompt."""
    if plan.stored is None:
        return
    if group != 2:
        raise ConfigError(
            f"train.group={group}: plan pairs has the two images of a record for each prompt; set "
            "it to 2"
        )
    if trains != "leaves":
        raise ConfigError(
            "likelihood: plan pairs has images and neither draws nor initial noise; take "
            "likelihood forward"
        )


def check_encodes(model: FlowModel, plan: Plan, *, data: bool = False) -> None:
    """Raise ConfigError where images have to become latents and the model cannot do that: those of
    plan `pairs`, or real ones (`data`)."""
    who = "plan pairs" if plan.stored is not None else "training on real images (data_velocity)"
    if (plan.stored is not None or data) and not isinstance(model, EncodesImages):
        raise ConfigError(
            f"model: {who} needs a model that encodes images, and {type(model).__name__} has no "
            "`latents(images)`"
        )


@torch.no_grad()
def stored_rollout(
    model: FlowModel,
    prompts: PromptSet,
    rows: list[int],
    *,
    sigmas: Tensor,
    size: tuple[int, int],
    first: int,
    micro_batch: int,
) -> tuple[Rollout, Tensor]:
    """Make the forest of stored pairs: a leaf for each image below a root without noise.

    rows: the prompts, which stand from place `first` on in the iteration; size: height and width.
    Returns the rollout and the images, uint8 [2 G, 3, H, W]. Raises DataError as `load_pairs`.
    """
    levels = load_pairs(_pairs(prompts, rows), *size)
    # latents of the images, a few at a time
    parts = []
    for part in levels.split(micro_batch):
        parts.append(model.latents(from_bytes(part)))  # type: ignore[attr-defined]
    x = torch.cat(parts)
    # stored images are clean, also for models whose own samples end above level 0
    sigmas = torch.cat([sigmas[:-1], torch.zeros_like(sigmas[:1])])
    # roots, then leaves
    count, device = len(levels), x.device
    groups = torch.arange(first, first + len(rows), device=device)
    node = torch.arange(count, device=device)
    below = torch.arange(2, device=device).repeat_interleave(count)  # 0 root, 1 leaf
    tree = Tree(
        parent=torch.cat([torch.full_like(node, -1), node]),
        step=below * (len(sigmas) - 1),
        std=torch.zeros(2 * count, device=device),
        group=groups.repeat_interleave(2).repeat(2),
    )
    zeros = torch.zeros(2 * count, device=device)
    made = Rollout(
        tree=tree,
        x=torch.cat([torch.zeros_like(x), x]),
        log_prob=zeros.double(),
        noise_scale=zeros,
        leaf=node + count,
        sigmas=sigmas,
        cond=encode_rows(model, prompts, rows, size),
        group_ids=groups,
        block=below,
    )
    return made, levels


def _pairs(prompts: PromptSet, rows: list[int]) -> list[PreferencePair]:
    folder = Path(prompts.path).parent
    return [read_pair(prompts.records[row], prompts.places[row], folder) for row in rows]
