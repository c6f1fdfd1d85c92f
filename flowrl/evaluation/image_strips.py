"""Strips: pictures that stand one below the other in one file, read without torch."""

from __future__ import annotations

import os

import numpy as np
from PIL import Image

from flowrl.core.errors import RunError
from flowrl.core.files import refuse_pipe


def read_strip(path: str | os.PathLike[str], count: int) -> np.ndarray:
    """Read `count` pictures of one size from a strip -> uint8 [count, H, W, 3]. Raises RunError if
    it holds others."""
    try:
        refuse_pipe(path)
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises all sorts on damaged files and on bombs
        raise RunError(
            f"{path}: expected a PNG of {count} images, cannot read it: {error}"
        ) from error
    if count < 1 or len(pixels) % count:
        raise RunError(
            f"{path}: expected {count} images of one height, got {len(pixels)} rows of pixels"
        )
    return pixels.reshape(count, -1, pixels.shape[1], 3)
