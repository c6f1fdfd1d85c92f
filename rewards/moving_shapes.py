"""Reward videos of one object by whether it moves as told, judged from pixels against the prompt's
record."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.moving_shapes import check_record, check_videos


class moving_shapes:
    """Score videos [L, T, 3, H, W]: "strict" 0 or 1, every frame and every move right; "graded" in
    [0, 1], the share of right frames and that of right moves, averaged.

    Records are those of assets/moving: class, color and direction. A video with NaN is not scored.
    """

    judges_videos = True
    judges_singly = True

    def __init__(self, *, mode: Literal["graded", "strict"] = "graded") -> None:
        if mode not in ("graded", "strict"):
            raise ConfigError(
                f'rewards.moving_shapes: `mode` must be "graded" or "strict"; got {mode!r}.'
            )
        self.mode = mode
        self.says_right = mode == "strict"

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first video is made."""
        check_record(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each video by its own record: -> [L] float32."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                "rewards.moving_shapes: one record per video is needed in `meta`; got "
                f"{len(batch.meta)} records for {len(batch.images)} videos"
            )
        if not len(batch.images):
            return torch.zeros(0)
        verdict = check_videos(batch.images, batch.meta)
        score = verdict.right if self.mode == "strict" else verdict.graded
        whole = batch.images.isfinite().flatten(1).all(1)
        return torch.where(whole, score.float(), torch.nan)
