"""Judges and scorers that know an image by its number, for the tests of win rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import RewardBatch
from rewards.win_rate import win_rate

Rule = Callable[[int, int], float]


def batch_of(group: list[int], ids: list[int] | None = None) -> RewardBatch:
    """Make 2x2 images whose red level is the image's number, so that a judge knows it."""
    numbers = torch.tensor(ids or list(range(len(group))), dtype=torch.float32) / 255
    images = numbers[:, None, None, None].expand(-1, 3, 2, 2)
    meta: list[dict[str, Any]] = [{"number": number} for number in group]
    prompts = [f"prompt {number}" for number in group]
    return RewardBatch(images, prompts, torch.tensor(group), meta, torch.zeros(len(group)))


def number_of(images: Tensor) -> list[int]:
    """Read the numbers of images."""
    return [round(float(image[0, 0, 0]) * 255) for image in images]


class Judge:
    """Compare images by a rule on their numbers, and keep what was asked."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.calls: list[list[tuple[int, int]]] = []
        self.words: list[tuple[str, int]] = []

    def compare(
        self, first: Tensor, second: Tensor, prompts: list[str], meta: list[dict[str, Any]]
    ) -> Tensor:
        pairs = list(zip(number_of(first), number_of(second), strict=True))
        self.calls.append(pairs)
        numbers = [record["number"] for record in meta]
        self.words = list(zip(prompts, numbers, strict=True))
        return torch.tensor([self.rule(a, b) for a, b in pairs])


class Scorer:
    """Score an image by a table on its number."""

    def __init__(self, table: list[float]) -> None:
        self.table = table

    def __call__(self, batch: RewardBatch) -> Tensor:
        return torch.tensor([self.table[n] for n in number_of(batch.images)])


def with_judge(judge: Any, **arguments: Any) -> win_rate:
    """Return a win rate that asks `judge`."""
    reward = win_rate(judge={"fn": "jpeg"}, **arguments)
    reward.judge = judge
    return reward
