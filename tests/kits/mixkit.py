"""Rewards of several names for tests of what transforms and mixes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import by_hand
from torch import Tensor

from flowrl.core.types import Mixed, RewardBatch, Scores


def scores(
    values: dict[str, list[float]], weights: list[float], groups: list[int] | None = None
) -> Scores:
    """Give each reward its values [L] and weight; roots are their own leaves, of one prompt."""
    size = len(next(iter(values.values())))
    rows = {name: torch.tensor(row) for name, row in values.items()}
    tree = by_hand([-1] * size, [0] * size, [1.0] * size, groups or [0] * size)
    return Scores(rows, dict(zip(values, weights, strict=True)), torch.arange(size), tree)


def batch(groups: list[int], tags: list[str] | None = None) -> RewardBatch:
    """Put black images of these prompts together, with the tag of each."""
    size = len(groups)
    meta: list[dict[str, Any]] = [{"tag": tag} for tag in tags] if tags else [{}] * size
    return RewardBatch(
        torch.zeros(size, 3, 1, 1), [""] * size, torch.tensor(groups), meta, torch.zeros(size)
    )


def same(reward: Tensor) -> Tensor:
    """Give each image what it was given."""
    return reward


def close(got: Mixed, expected: list[float]) -> None:
    """Compare advantages with those expected."""
    assert got.advantage.tolist() == pytest.approx(expected, abs=2e-6, nan_ok=True)
