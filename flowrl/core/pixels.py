"""Pixels as the rest of the world keeps them: 256 levels a channel."""

from __future__ import annotations

import torch
from torch import Tensor


def to_bytes(images: Tensor) -> Tensor:
    """Round images in [0, 1] to 256 levels -> uint8. `from_bytes` gives what `round_8bit` gives, to
    the bit."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8)


def from_bytes(levels: Tensor) -> Tensor:
    """Return images of 256 levels, uint8, as float32 in [0, 1]."""
    return levels.float().div_(255)


def round_8bit(images: Tensor) -> Tensor:
    """Round images in [0, 1] to the 256 levels that a PNG keeps, so that a saved image scores
    the same."""
    return (images.float().clamp(0, 1) * 255).round() / 255
