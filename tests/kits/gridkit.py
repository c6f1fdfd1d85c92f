"""Images of one colour, and finding them again in a grid."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Color = tuple[int, int, int]
Box = tuple[int, int, int, int]


def plain(*colors: Color, height: int = 8, width: int = 8) -> Tensor:
    """One image of one colour for each of `colors`."""
    return (torch.tensor(colors) / 255)[:, :, None, None].expand(-1, -1, height, width)


def box(image: Image.Image, color: Color) -> Box:
    """Left, top, right, bottom of the rectangle that holds `color`, every pixel of it and no other
    one."""
    ys, xs = np.nonzero((np.asarray(image) == color).all(-1))
    found = (int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1)
    assert len(xs) == (found[2] - found[0]) * (found[3] - found[1])
    return found


def size(found: Box) -> tuple[int, int]:
    return found[2] - found[0], found[3] - found[1]


def ink(image: Image.Image, left: int, top: int, right: int, bottom: int) -> int:
    """Count the dark pixels of a region: written text."""
    return int((np.asarray(image.convert("L"))[top:bottom, left:right] < 160).sum())
