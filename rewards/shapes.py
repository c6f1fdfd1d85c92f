"""Reward pictures of coloured shapes by what is on them, judged from pixels against the prompt's GenEval record."""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import ConfigError, DataError
from flowrl.shapes.checker import Verdict, check, validate
from flowrl.types import RewardBatch


class _Judged(NamedTuple):
    """The last batch and what was found on it: both modes in one run look at the same pictures."""

    images: weakref.ref[Tensor]
    version: int  # how often the pictures were changed in place
    meta: list[dict[str, Any]]
    verdict: Verdict


_last: _Judged | None = None


def _judge(batch: RewardBatch) -> Verdict:
    global _last
    images, meta, seen = batch.images, batch.meta, _last
    if images.is_inference():  # such tensors do not count their changes
        return check(images, meta)
    if seen is not None and seen.images() is images and seen.version == images._version and seen.meta is meta:
        return seen.verdict
    verdict = check(images, meta)
    _last = _Judged(weakref.ref(images), images._version, meta, verdict)
    return verdict


class shapes:  # noqa: N801 - configs name rewards in lower case
    """Score pictures [L, 3, 64, 64]: "graded" in [0, 1] (1 exactly where strictly right), or "strict" 0 or 1.

    Records and strict verdict are GenEval's (Ghosh et al. 2023); flowrl/shapes/checker.py says what differs. Pictures
    are rounded to 8 bits first, so that a tensor and its PNG score the same. A picture without a valid GenEval record,
    with NaN or of the wrong size is a DataError, never a made-up score.
    """

    def __init__(self, *, mode: Literal["graded", "strict"] = "graded") -> None:
        if mode not in ("graded", "strict"):
            raise ConfigError(f'rewards.shapes: `mode` must be "graded" or "strict"; got {mode!r}.')
        self.mode = mode

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first picture is made."""
        validate(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each picture by its own record: -> [L] float32."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                f"rewards.shapes: one GenEval record per picture is needed in `meta`; got {len(batch.meta)} records "
                f"for {len(batch.images)} pictures. Use a prompt file in GenEval's JSONL schema."
            )
        verdict = _judge(batch)
        score = verdict.strict if self.mode == "strict" else verdict.graded
        return score.to(batch.images.device, torch.float32)
