"""Reward edits of coloured shapes: the asked change was made, and nothing else changed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.edit_checker import check_edits, validate_edit


class shapes_edit:  # noqa: N801 - configs name rewards in lower case
    """Score edits [L, 3, 64, 64] of sources of that size: "graded" in [0, 1], 1 exactly where
    strictly right and 0 for a copy of the source, or "strict", 0 or 1.

    What counts is in flowrl/evaluation/suites/shapes/edit_checker.py. A batch without sources, or a
    source that does not have the object of the edit, is a DataError.
    """

    judges_singly = True

    def __init__(self, *, mode: Literal["graded", "strict"] = "graded") -> None:
        if mode not in ("graded", "strict"):
            raise ConfigError(
                f'rewards.shapes_edit: `mode` must be "graded" or "strict"; got {mode!r}.'
            )
        self.mode, self.says_right = mode, mode == "strict"

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made."""
        validate_edit(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each image by its own record and source: -> [L] float32."""
        if len(batch.source) != len(batch.images) or any(len(s) != 1 for s in batch.source):
            raise DataError(
                "rewards.shapes_edit: expected one source for each image; got "
                f"{len(batch.source)} for {len(batch.images)} images. Use a list "
                "whose records have `source`, such as assets/shapes-edits/train.jsonl."
            )
        if not len(batch.images):
            return torch.zeros(0)
        sources = torch.stack([source[0] for source in batch.source])
        verdict = check_edits(batch.images, sources, batch.meta)
        score: Tensor = getattr(verdict, self.mode)
        return score.to(batch.images.device, torch.float32)
