"""Runs of the toy on the command line, and what two of them have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from toykit import write_toy

from flowrl.runs.folder import read_rows
from flowrl.training import checkpoint

ALL = ("train.prompts=4", "train.max_grad_norm=.inf")


def command(folder: Path, run: str, *overrides: str) -> list[str]:
    """Return what `flowrl train` is called with, for a run of 4 iterations in `folder`."""
    words = ["train", str(write_toy(folder)), *ALL, "train.iterations=4", *overrides]
    return [*words, "--run", str(folder / run), "--plugin", "toykit", "--quiet"]


def resume(run: Path) -> list[str]:
    return ["train", "--resume", str(run), "--plugin", "toykit", "--quiet"]


def same(one: Any, two: Any, where: str, near: float = 2e-6) -> None:
    """Compare nested values, numbers to 1e-4 of their size."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            same(one[key], two[key], f"{where}/{key}", near)
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for n, (a, b) in enumerate(zip(one, two, strict=True)):
            same(a, b, f"{where}/{n}", near)
    elif isinstance(one, float):
        assert math.isclose(one, two, rel_tol=1e-4, abs_tol=near), (where, one, two)
    else:
        assert one == two, where


def same_rows(one: Path, two: Path, file: str, near: float = 2e-6) -> None:
    a, b = (read_rows(run, file) for run in (one, two))
    same(a, b, file, near)


def same_weights(one: Path, two: Path, at: str, names: list[str], near: float) -> None:
    for name in names:
        a, b = (checkpoint.load(run / "checkpoints" / at)[0][name] for run in (one, two))
        torch.testing.assert_close(b, a, rtol=0, atol=near)
