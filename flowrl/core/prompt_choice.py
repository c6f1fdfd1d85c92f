"""What the choice of an iteration's prompts may depend on, and what a sampler of prompts is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class PromptDraw(NamedTuple):
    """What a sampler sees of an iteration before its first image."""

    iteration: int
    places: int  # of the iteration: `train.prompts`
    group: int  # images of a place: `train.group`
    # (from, so many) -> rows of the training list: the endless stream of shuffled epochs
    stream: Callable[[int, int], list[int]]
    generator: torch.Generator  # on the CPU, seeded by (seed, iteration)


class Visit(NamedTuple):
    """What a prompt's images were worth in an iteration."""

    row: int  # of the training list
    mean: float  # of the weighted sum of rewards, after their transforms
    std: float  # biased
    images: int  # that were scored


@runtime_checkable
class PromptSampler(Protocol):
    """Choose the prompts of each iteration. Calling it changes nothing; `update` takes in what an
    iteration showed, and checkpoints keep what it remembers."""

    # whether places of one prompt are one group: it may then get more images than another
    joins: bool

    def start(self, prompts: list[str]) -> None: ...  # those of the training list

    def __call__(self, draw: PromptDraw) -> list[int]: ...  # a row for each place

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...
