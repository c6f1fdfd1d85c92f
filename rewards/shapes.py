"""Reward images of coloured shapes by what is on them, judged from pixels against the prompt's
GenEval record."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.checker import Verdict, check, validate


class _Judged(NamedTuple):
    """The last batch and what was found on it: all modes in one run look at equal images."""

    pixels: Tensor
    records: str
    verdict: Verdict


_last: _Judged | None = None


def _judge(batch: RewardBatch) -> Verdict:
    """Judge a batch, or return what was found on the last one if its contents are equal."""
    global _last
    pixels, records = batch.images.detach().cpu(), f"{batch.meta}"
    if _last is not None and _last.records == records and _same(_last.pixels, pixels):
        return _last.verdict
    verdict = check(batch.images, batch.meta)
    # a copy: whoever called may change these images, and ask again
    _last = _Judged(pixels.clone(), records, verdict)
    return verdict


def _same(one: Tensor, other: Tensor) -> bool:
    """Say whether two batches are equal; one with a NaN never is."""
    return one.dtype == other.dtype and torch.equal(one, other)


class shapes:
    """Score images [L, 3, 64, 64]: "graded_angle" in [0, 1] (1 exactly where strictly right), or
    "strict" 0 or 1.

    A relation pays the cosine to the asked direction over 0.5, up to 1, and nothing for
    perpendicular or opposite. "graded", as version 0.1 had it, pays (cosine + 1) / 1.5, up to 1, so
    2/3 for perpendicular.

    Records and strict verdict are GenEval's (Ghosh et al. 2023);
    flowrl/evaluation/suites/shapes/checker.py says what differs. Images are rounded to 8 bits
    first, so that a tensor and its PNG score the same. An image without a valid GenEval record,
    with NaN or of the wrong size is a DataError, never a made-up score.
    """

    judges_singly = True

    def __init__(
        self, *, mode: Literal["graded", "graded_angle", "strict"] = "graded_angle"
    ) -> None:
        if mode not in ("graded", "graded_angle", "strict"):
            raise ConfigError(
                'rewards.shapes: `mode` must be "graded", "graded_angle" or "strict"; '
                f"got {mode!r}."
            )
        self.mode = mode
        self.says_right = mode == "strict"

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made."""
        validate(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each image by its own record: -> [L] float32."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                "rewards.shapes: one GenEval record per image is needed in `meta`; got "
                f"{len(batch.meta)} records for {len(batch.images)} images. Use a prompt file in "
                "GenEval's JSONL schema."
            )
        verdict = _judge(batch)
        score: Tensor = getattr(verdict, self.mode)
        return score.to(batch.images.device, torch.float32)
