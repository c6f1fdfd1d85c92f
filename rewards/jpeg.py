"""Reward images whose JPEG file is small, or large: DDPO's compressibility and
incompressibility."""

from __future__ import annotations

import io
import math
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from ._common.scorer import to_pil

SIGN = {"compressibility": -1.0, "incompressibility": 1.0}


class jpeg:
    """Score images [L, 3, H, W] in [0, 1] by their size as JPEG -> [L] float32: -kB / scale, or
    kB / scale.

    1 kB is 1000 bytes. DDPO (Black et al. 2023, 2305.13301, section 5.1; kvablack/ddpo-pytorch,
    rewards.py): scale 1. **Differs:** Flow-GRPO and DiffusionNFT divide compressibility (and it
    alone) by 500: `scale: 500`. `quality` is fixed to 95 in all of them. The bytes depend on the
    release of Pillow and of its libjpeg.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        goal: Literal["compressibility", "incompressibility"] = "compressibility",
        quality: int = 95,
        scale: float = 1.0,
    ) -> None:
        if goal not in SIGN:
            raise ConfigError(f"rewards.jpeg: goal: expected {' or '.join(SIGN)}, got {goal!r}")
        if not 1 <= quality <= 100:
            raise ConfigError(f"rewards.jpeg: quality: expected 1 to 100, got {quality}")
        if not (scale > 0 and math.isfinite(scale)):
            raise ConfigError(
                "rewards.jpeg: scale: expected a number above 0 (kB per unit of score), got "
                f"{scale}"
            )
        self.quality, self.factor = quality, SIGN[goal] / scale

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Encode each image and count its bytes; nothing is written to disk."""
        sizes = torch.tensor(
            [self._bytes(image) for image in to_pil(batch.images)], dtype=torch.float64
        )
        return (self.factor * sizes / 1000).float()

    def _bytes(self, image: Image.Image) -> int:
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell()
