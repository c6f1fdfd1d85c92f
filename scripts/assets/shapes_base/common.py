"""What all stages share: names and numbers of the recipe, schedule, log, optimizers."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from muon import Muon
from torch import Tensor, nn

from flowrl.evaluation.suites.shapes.prompts import TASKS
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE

CAPTIONS = 8
"""Captions of each scene: slot 0 is its prompt, the other seven are dense ones."""

TOKENS = 20
"""Length of a text: the longest caption has 16 words, the longest prompt 10; start and end."""

KINDS = (*TASKS, "mixed")
SHARES = (0.05, 0.09, 0.16, 0.08, 0.25, 0.27, 0.10)
"""Kinds of scenes, and their shares; `mixed` ones show three or four objects of several classes."""

CHANNELS = 16
GRID = SIZE // 8
"""Channels of a latent, and its side in cells."""

NOTHING = len(CLASSES) * len(COLORS)
"""A cell's label where nothing stands. A thing's is class * 6 + colour."""

WORK = "training"
"""Folder in `--out` for what a stage hands on to the next; not part of the model."""


def warm_cosine(step: int, total: int, warmup: int, floor: float = 0.02) -> float:
    """Return the learning rate's factor: linear warm-up, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give all groups of an optimizer one learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class Log:
    """Append rows to a JSONL file and print them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def __call__(self, **row: Any) -> None:
        """Add one row; numbers are rounded to six places."""
        row = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


Network = TypeVar("Network", bound=nn.Module)


class Averaged(Generic[Network]):
    """A network that is trained from nothing by two optimizers on one schedule, and its average
    over steps."""

    def __init__(
        self, network: Network, lr: float, steps: int, ema: float, warmup: int = 100
    ) -> None:
        self.network, self.warmup = network, warmup
        self.lr, self.steps, self.ema = lr, steps, ema
        self.average = copy.deepcopy(network).requires_grad_(False).eval()
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in network.named_parameters():
            hidden = "transformer_blocks" in name and "norm" not in name and p.ndim == 2
            (matrices if hidden else rest).append(p)
        self.optimizers = (
            Muon(matrices, lr=lr, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
        )

    def descend(self, loss: Tensor, step: int) -> float:
        """Take one step down a loss -> it as a number."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        # Muon for the matrices of attention blocks, AdamW for the rest, by one schedule
        for optimizer in self.optimizers:
            set_lr(optimizer, self.lr * warm_cosine(step, self.steps, self.warmup))
            optimizer.step()
        # averaged weights: short memory at first, long later
        decay = min(self.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            ours: list[Tensor] = [*self.average.parameters()]
            theirs: list[Tensor] = [*self.network.parameters()]
            torch._foreach_lerp_(ours, theirs, 1 - decay)
        return loss.item()
