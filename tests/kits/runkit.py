"""One finished run of the toy config, for the tests of what is done with runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from toykit import toy

from flowrl.config.load import Config
from flowrl.runs.report.style import save_figure
from flowrl.runs.train import train


def config_for(folder: Path, *overrides: str) -> Config:
    """Return the config of the run."""
    return toy(folder, "kl={fn: transition_kl, beta: 0.1}", "train.warmup=3", *overrides)


def make_home(folder: Path) -> Path:
    """Write prompts, toy.yaml and `whole`, an uninterrupted run of 4 iterations, with its curves
    drawn."""
    with patch("flowrl.runs.train.save_figure", save_figure):
        train(config_for(folder), folder / "whole", quiet=True)
    return folder


def rows(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]
