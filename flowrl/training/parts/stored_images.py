"""Images that were there before the run, in place of those that a model samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.abilities import known_ahead
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.core.pixels import from_bytes
from flowrl.core.prompts import PromptSet
from flowrl.core.types import FlowModel, Plan, Rollout, Tree
from flowrl.evaluation.preference_pairs import (
    PreferencePair,
    check_pairs,
    labels_of,
    load_pairs,
    read_pair,
)
from flowrl.evaluation.sources import encode_rows
from flowrl.training.run import Iteration, Prepared, Run
from flowrl.training.task import IterationCost, Task


@runtime_checkable
class EncodesImages(Protocol):
    """A model that has a way back from images to latents."""

    def latents(self, images: Tensor) -> Tensor:
        """Return latents [B, *] of images [B, 3, H, W] in [0, 1], such that `decode` gives about
        the same images."""
        ...


class StoredImages(Part):
    """Pairs of images that the prompts' records name (plan `pairs`)."""

    name = "stored images"
    rank = 40
    when = ("plan.stored",)

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a method that cannot train on the two stored images of each prompt."""
        config, likelihood = task.config, task.method.likelihood
        check_encodes_ahead(config, f"plan {config.plan.fn}")
        if getattr(likelihood, "noise", "") == "initial":
            raise ConfigError(
                f"likelihood.noise=initial: plan {config.plan.fn} samples nothing, so its images "
                "have no initial noise; set it to fresh"
            )
        if config.train.group != 2:
            raise ConfigError(
                f"train.group={config.train.group}: plan pairs has the two images of a record for "
                "each prompt; set it to 2"
            )
        if likelihood.trains != "leaves":
            raise ConfigError(
                "likelihood: plan pairs has images and neither draws nor initial noise; take "
                "likelihood forward"
            )

    def work(self, task: Task, plan: Plan, cost: IterationCost) -> IterationCost:
        """Say that images are read."""
        return replace(cost, source=f"from files, encoded {cost.rollout_batch} at a time")

    def begin(self, prepared: Prepared) -> None:
        """Look whether every record names its pair."""
        check_pairs(prepared.train_set)

    def check_model(self, prepared: Prepared, model: Any, frames: int) -> None:
        """Refuse a model that has no way from images to latents."""
        check_encodes(model, "plan pairs")

    def rollout(self, run: Run, rows: list[int], first: int) -> tuple[Rollout, Tensor]:
        """Read the stored images of training prompts."""
        c, plan = run.config, run.method.plan(run.iteration)
        with run.parts.inside("encoding", run):
            return stored_rollout(
                run.model,
                run.train_set,
                rows,
                sigmas=run.sigmas(plan),
                size=run.size,
                first=first,
                micro_batch=c.train.rollout_batch,
            )

    def credit_sees(
        self, run: Run, it: Iteration, credit: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Let the credit see the pairs' labels in place of rewards, where the plan says so."""
        if run.method.plan(run.iteration).stored != "labels":
            return credit
        assert it.batch is not None
        labels = labels_of(it.batch.meta, it.batch.group)

        def by_label(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
            return credit(labels.to(reward), leaf, tree)

        return by_label


def check_encodes_ahead(config: Config, who: str) -> None:
    """Raise ConfigError if images have to become latents and the model, by what is known before it
    is loaded, cannot do that."""
    if not known_ahead(config.model.function, config.model.kwargs).encodes_images:
        raise ConfigError(
            f"model: {who} needs a model that encodes images, and a pipeline without adapter does "
            "not say how they become latents; take a method that samples its images, or a class "
            "with an adapter"
        )


def check_encodes(model: Any, who: str) -> None:
    """Raise ConfigError if images have to become latents and the model cannot do that."""
    if not isinstance(model, EncodesImages):
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
