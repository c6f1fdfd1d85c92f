"""Pixels as the rest of the world keeps them: 256 levels a channel."""

from __future__ import annotations

from torch import Tensor


def round_8bit(images: Tensor) -> Tensor:
    """Round images in [0, 1] to the 256 levels that a PNG keeps, so that a saved image scores
    the same."""
    return (images.float().clamp(0, 1) * 255).round() / 255
