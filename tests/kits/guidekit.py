"""A tiny Stable Diffusion 3 that a method of finished images trains, for tests of what it is told:
guidance, prompts, and prompts that are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from estimatekit import model_config
from tiny import tiny_sd3
from toykit import axes

from flowrl.config.load import Config
from flowrl.training.trainer import Trainer

SIZE = "image={height: 64, width: 48}"
FORWARD = [*axes("shapes/awm"), "train.group=4"]


def config_of(folder: Path, *overrides: str, guidance: float = 1.0) -> Config:
    """Return AWM, with its distances to the base model and to a slow copy, on a tiny SD3."""
    if not (folder / "weights").exists():
        tiny_sd3(folder / "weights")
    model = f"{{fn: sd3, guidance: {guidance}, tune: full, path: {folder}/weights, device: cpu}}"
    return model_config(folder, model, SIZE, *FORWARD, "train.updates=1", *overrides)


def texts_encoded_ahead(run: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts that are encoded before the first iteration, which must encode none."""
    asked, embed = [], run.model._embed  # type: ignore[attr-defined]

    def noted(prompt: str) -> Any:
        asked.append(prompt)
        return embed(prompt)

    monkeypatch.setattr(run.model, "_embed", noted)
    run.encode_ahead()
    ahead = list(asked)
    run.step()
    assert asked == ahead
    return ahead
