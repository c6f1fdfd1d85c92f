"""The ground on which group techniques are compared in seconds: a linear field, and prompts that
ask for more or less red.

A plugin of configs: `field` is the model, `strict` says whether an image is as red as its prompt
asks, `soft` how nearly. Of the training prompts some are met at once and some hardly ever, so that
the groups of an iteration range from all right to all wrong.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from flowrl.config.load import Config, load_config
from flowrl.core.types import RewardBatch
from flowrl.models.toy import LinearFlow

LOW, HIGH = -0.3, 0.6  # of what is asked for: mean red less mean green
CONFIG = """
name: techniques-toy
model: {{fn: technique_toy.field}}
prompts: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}
image: {{height: 8, width: 8}}
plan: {{fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}}
transition: {{fn: dance_sde}}
rewards:
  strict: {{fn: technique_toy.strict}}
  soft: {{fn: technique_toy.soft, weight: 0.0}}
credit: {{fn: group_norm}}
likelihood: {{fn: reverse}}
loss: {{fn: ppo_clip, clip_low: 1.0e-3, clip_high: 1.0e-3}}
optimizer: {{fn: adamw, lr: 0.01}}
train: {{
  iterations: 1000, prompts: 8, group: 8, updates: 2, micro_batch: 256, rollout_batch: 256,
  threads: 1, ema: 0
}}
eval: {{steps: 4, images: 16, weights: current}}
"""


def field(*, seed: int = 0) -> LinearFlow:
    """Return a field on a latent of two numbers, red and green."""
    return LinearFlow(channels=2, scale=0.3, seed=seed)


def redness(batch: RewardBatch) -> Tensor:
    """Return mean red less mean green of images [L, 3, H, W] -> [L] in [-1, 1]."""
    return batch.images[:, 0].mean((1, 2)) - batch.images[:, 1].mean((1, 2))


def asked(batch: RewardBatch) -> Tensor:
    """Return what each image's prompt asks for [L]."""
    return torch.tensor([record["level"] for record in batch.meta])


def strict(batch: RewardBatch) -> Tensor:
    """Score 1 where an image is as red as its prompt asks, else 0 -> [L]."""
    return (redness(batch) >= asked(batch)).float()


def soft(batch: RewardBatch) -> Tensor:
    """Score how nearly an image is as red as its prompt asks -> [L] in (0, 1)."""
    return torch.sigmoid((redness(batch) - asked(batch)) / 0.1)


def toy(folder: Path, changes: list[str]) -> Config:
    """Write the lists of prompts and the config into a folder, and load it with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    # held-out prompts ask for what lies between the levels of the training prompts
    for name, count, shift in (("train", 48, 0.0), ("test", 24, 0.5)):
        lines = []
        for n in range(count):
            level = LOW + (HIGH - LOW) * (n + shift) / (count - 1 + shift)
            lines.append(json.dumps({"prompt": f"{name} patch {n}", "level": level}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    file = folder / "toy.yaml"
    file.write_text(CONFIG.format(folder=folder))
    return load_config(file, changes, ("technique_toy",))
