"""Prompts of the toy with real images, for penalties that train on these."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storedkit import GREEN, RED, paint
from toykit import COLORS, write_toy

from flowrl.config.load import load_config
from flowrl.training.trainer import Trainer

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
