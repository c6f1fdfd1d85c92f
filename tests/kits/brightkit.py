"""A reward that tells any two images apart, for models that draw nothing that means something."""

from __future__ import annotations

from torch import Tensor

from flowrl.core.types import RewardBatch


class Bright:
    """How bright an image or a video is, seen closely."""

    judges_videos = True

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Return the mean of all pixels, times a hundred [L]."""
        return batch.images.float().flatten(1).mean(1) * 100


class BrightImage:
    """The same of images alone."""

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Return the mean of all pixels, times a hundred [L]."""
        return batch.images.float().flatten(1).mean(1) * 100
