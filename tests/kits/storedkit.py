"""Stored pairs on the toy: a list in which red is preferred to green, and what reads it; and its
prompts with real images, for penalties that train on these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from toykit import COLORS, write_toy

from flowrl.config.load import load_config
from flowrl.training.trainer import Trainer

PAIRS = (
    "model={fn: toykit.linear, channels: 2}",
    "image={height: 8, width: 8}",
    "train={iterations: 99, prompts: 4, group: 2, updates: 1, micro_batch: 64, threads: 1}",
    "plan={fn: pairs}",
    "likelihood={fn: forward, draws: 2, shared: true}",
    "credit={fn: best_worst}",
    "segment={fn: prompt}",
    "select={fn: nonzero}",
    "loss={fn: diffusion_dpo, beta: 1.0}",
    "optimizer.lr=0.02",
)
RED, GREEN = (200, 40, 90), (40, 200, 90)


def paint(file: Path, colour: tuple[int, int, int], size: int = 8) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), colour).save(file)
    return file


def write_pairs(folder: Path, change: Callable[[list[dict[str, Any]]], None] | None = None) -> str:
    """Write the toy, and a list in which red is preferred to green, first or second in turn."""
    config = write_toy(folder)
    paint(folder / "red.png", RED)
    paint(folder / "green.png", GREEN)
    names = ["red.png", "green.png"]
    rows: list[dict[str, Any]] = []
    for number, word in enumerate(("red", "green", "blue", "grey")):
        first, second = names if number % 2 else names[::-1]
        label = {"image_0": first, "image_1": second, "label_0": number % 2}
        rows.append({"prompt": f"a {word} dot", **label})
    if change is not None:
        change(rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(config)


DATA = "kl={fn: data_velocity, beta: 0.1}"
Rows = list[dict[str, Any]]


def write_real(folder: Path, change: Callable[[Rows], None] | None = None) -> str:
    """Write the toy, whose prompts have a red image and a green one in turn -> the config."""
    config = write_toy(folder)
    paint(folder / "images/red.png", RED, 16)
    paint(folder / "images/green.png", GREEN, 16)
    rows: Rows = []
    for number, word in enumerate(COLORS):
        name = ("red", "green")[number % 2]
        rows.append({"prompt": f"a {word} dot", "tag": "any", "image": f"images/{name}.png"})
    if change is not None:
        change(rows)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(config)


def real_trainer(config: str, *overrides: str, model: Any = None) -> Trainer:
    """Return a trainer of `write_real`'s config with overrides."""
    return Trainer(load_config(config, overrides, ("toykit",)), model=model)
