"""The run that faults are put into, and faults that a config can name: rewards, a credit, a
transition and losses that are wrong on purpose. What is put into flowrl's code is in doctorpatches.

The run is the embedded shapes model with guidance, a KL and three trained steps of four.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.losses.policy import ppo_clip
from flowrl.algorithms.transitions import flow_sde
from flowrl.config.load import Config, load_config
from flowrl.core.shipped_files import resource
from flowrl.core.types import Gaussian, LossInput, RewardBatch, Tree
from rewards.shapes import shapes

PLUGINS = ("doctorkit", "brokenkit", "toykit")
SOUND = [
    "model.dtype=float32",
    "model.guidance=2.5",
    "plan={fn: full, steps: 4, noise_scale: 0.4, ode_last: 1}",
    "transition={fn: flow_sde}",
    "kl={fn: transition_kl, beta: 0.1}",
    "rewards={shapes: {fn: shapes, mode: graded_angle}}",
    "eval.score=shapes",
    "train={iterations: 100, prompts: 3, group: 4, updates: 2, micro_batch: 8, rollout_batch: 8}",
]
"""Overrides of shapes/flow_grpo that make the run that is broken; nothing is wrong with it."""


def sound(*overrides: str) -> Config:
    """Return the config of the run, with more overrides."""
    return load_config("shapes/flow_grpo", [*SOUND, *overrides], PLUGINS)


def prompts_with(folder: Path, change: str) -> str:
    """Write a training list with copies, or with a prompt that no encoder reads to its end."""
    lines = resource("assets/shapes/train.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    if change == "copies":
        lines += lines[:2]
    else:
        record = json.loads(lines[0])
        lines[0] = json.dumps(record | {"prompt": record["prompt"] + " on white" * 20})
    file = folder / f"{change}.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"prompts.train={file}"


# ------------------------------------------------------------------------------ faults of a plugin

_right = shapes(mode="graded_angle")


def constant(batch: RewardBatch) -> Tensor:
    """Like everything alike."""
    return torch.full((len(batch.images),), 0.3)


def _sampled(batch: RewardBatch) -> bool:
    """Say whether images are a group of the model's own; the self-test has two of a prompt."""
    return Counter(batch.prompts).most_common(1)[0][1] > 2


_CHANCE = torch.Generator().manual_seed(0)  # the global one depends on the tests before


def noisy(batch: RewardBatch) -> Tensor:
    """Add far more chance than there is difference, where the images are the model's own."""
    score = _right(batch)
    return score + 4 * torch.rand(len(score), generator=_CHANCE) if _sampled(batch) else score


def flat(batch: RewardBatch) -> Tensor:
    """See no difference between the model's own images."""
    score = _right(batch)
    return 0 * score if _sampled(batch) else score


def broken(batch: RewardBatch) -> Tensor:
    """Fail."""
    raise ValueError("out of ideas")


def one_group(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Compare all images as if they were of one prompt."""
    return group_norm(reward, leaf, tree._replace(group=0 * tree.group))


def worse(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Take the wrong sign."""
    return -group_norm(reward, leaf, tree)


def drifting(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor
) -> Gaussian:
    """Move the mean at any noise scale."""
    mean, std = flow_sde(x, v, sigma, sigma_next, noise_scale)
    return Gaussian(mean + 0.01, std)


def descending(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Take the wrong sign."""
    loss, metrics = ppo_clip(data, clip_low=0.05, clip_high=0.05)
    return -loss, metrics


def infinite(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Overflow."""
    loss, metrics = ppo_clip(data, clip_low=0.05, clip_high=0.05)
    return loss * torch.inf, metrics
