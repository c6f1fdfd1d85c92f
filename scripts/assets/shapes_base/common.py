"""What all stages share: names and numbers of the recipe, schedule, log, state on the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.core.files import replacing, write_text
from flowrl.evaluation.suites.shapes.prompts import TASKS
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE

CAPTIONS = 8
"""Captions of each scene: slot 0 is its prompt, the other seven are dense ones."""

TOKENS = 20
"""Length of a text: the longest caption has 16 words, the longest prompt 10; start and end."""

KINDS = (*TASKS, "mixed")
"""Kinds of scenes; `mixed` ones show three or four objects of several classes."""

CHANNELS = 16
GRID = SIZE // 8
"""Channels of a latent, and its side in cells."""

NOTHING = len(CLASSES) * len(COLORS)
"""A cell's label where nothing stands. A thing's is class * 6 + colour."""

WORK = "training"
"""Folder in `--out` for the files that a stage resumes from; not part of the model."""


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

    def __init__(self, path: Path, resume_step: int) -> None:
        """Keep the rows of `path` up to `resume_step`; later ones are made again."""
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= resume_step]
        path.write_text("".join(line + "\n" for line in kept))

    def __call__(self, **row: Any) -> None:
        """Add one row; numbers are rounded to six places."""
        row = {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def save_state(folder: Path, name: str, tensors: dict[str, Tensor], step: int) -> None:
    """Write tensors, then the small file that says after how many steps; each whole or not."""
    whole = {key: value.contiguous().clone() for key, value in tensors.items()}
    with replacing(folder / f"{name}.safetensors") as draft:
        save_file(whole, draft)
    write_text(folder / f"{name}.json", json.dumps({"step": step}))


def load_state(folder: Path, name: str) -> tuple[dict[str, Tensor], int]:
    """Read what `save_state` wrote -> tensors, steps done; none and 0 where there is no state."""
    if not (folder / f"{name}.json").exists():
        return {}, 0
    step = json.loads((folder / f"{name}.json").read_text())["step"]
    return load_file(folder / f"{name}.safetensors"), step


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put `prefix.` before all names."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix.`, named without it."""
    dotted = prefix + "."
    return {k.removeprefix(dotted): v for k, v in tensors.items() if k.startswith(dotted)}


def pack_optimizer(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """Return an optimizer's state as tensors named `prefix.<parameter>.<key>`."""
    packed = {}
    for index, row in optimizer.state_dict()["state"].items():
        for key, value in row.items():
            packed[f"{prefix}.{index}.{key}"] = torch.as_tensor(value)
    return packed


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str, tensors: dict[str, Tensor]
) -> None:
    """Give an optimizer the state that `pack_optimizer` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in part(prefix, tensors).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
