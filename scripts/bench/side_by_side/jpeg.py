"""The reward of all trainers: the size of an image as JPEG."""

from __future__ import annotations

import io

from PIL import Image


def kilobytes(image: Image.Image) -> float:
    """Return the size of an image as JPEG."""
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return file.tell() / 1000
