"""What every check of a reward gets and gives: the reward under test, and one row of its report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.types import Reward
from flowrl.evaluation.reward_tests.damage import DAMAGES
from flowrl.evaluation.score_images import PromptedImage, RewardScores

Verdict = Literal["ok", "weak", "fails", "skipped", ""]


class CheckResult(NamedTuple):
    """What one check found."""

    reward: str
    check: str
    verdict: Verdict  # "" = a figure without a verdict
    found: str  # in words
    figures: dict[str, float]
    hard: bool = False  # to fail here is a fault whatever the reward is meant to like


class RewardUnderTest(NamedTuple):
    """A reward under test, what it said at first, and how to ask it again."""

    name: str
    reward: Reward
    # one group per image; with its noisy twin where the reward compares within groups
    images: Sequence[PromptedImage]
    ask: Callable[[Sequence[PromptedImage], int], RewardScores]  # images, images per batch
    batch: int
    first: RewardScores
    slack: float  # differences up to this are rounding

    @property
    def grouped(self) -> bool:
        """Say whether the reward compares images of a group with each other."""
        return "group" in self.first.reads

    @property
    def singles(self) -> list[PromptedImage]:
        """Return the first image of each group: the undamaged ones."""
        by_group = {image.group: image for image in reversed(self.images)}
        return list(by_group.values())[::-1]

    def result(
        self,
        check: str,
        verdict: Verdict,
        found: str,
        figures: dict[str, float] | None = None,
        hard: bool = False,
    ) -> CheckResult:
        """Return what a check of this reward found."""
        return CheckResult(self.name, check, verdict, found, figures or {}, hard)


def damaged(image: PromptedImage, damage: str, seed: int) -> PromptedImage:
    """Return the same image, made worse."""

    def load() -> Tensor:
        return DAMAGES[damage](image.load(), seed)

    return image._replace(load=load, name=f"{image.name} ({damage})")


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest distance of scores [N], infinity where only one of them is NaN."""
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    known = ~a.isnan()
    return float((a[known].double() - b[known].double()).abs().max()) if bool(known.any()) else 0.0
