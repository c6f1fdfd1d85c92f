"""Pixels as the rest of the world keeps them: 256 levels a channel."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor


def to_bytes(images: Tensor) -> Tensor:
    """Round images in [0, 1] to 256 levels -> uint8. `from_bytes` gives what `round_8bit` gives, to
    the bit."""
    # one copy, then in place
    return images.to(torch.float32, copy=True).clamp_(0, 1).mul_(255).round_().to(torch.uint8)


def from_bytes(levels: Tensor) -> Tensor:
    """Return images of 256 levels, uint8, as float32 in [0, 1]."""
    return levels.float().div_(255)


def round_8bit(images: Tensor) -> Tensor:
    """Round images in [0, 1] to the 256 levels that a PNG keeps, so that a saved image scores
    the same."""
    return (images.float().clamp(0, 1) * 255).round() / 255


# Adam7's passes: first column and row, and the distances to the next ones
_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by a PNG's colour type


def png_needs(file: bytes) -> int:
    """Return how many bytes the rows of a PNG take, by its header (PNG 1.2, 2.3 and 2.6). Raises
    ValueError where that is none of a PNG."""
    if file[12:16] != b"IHDR" or len(file) < 29 or file[25] not in _CHANNELS:
        raise ValueError("no header of a PNG")
    width, height, depth, color, interlaced = struct.unpack(">IIBB2xB", file[16:29])
    bits, need = depth * _CHANNELS[color], 0
    for left, top, right, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -((left - width) // right), -((top - height) // down)
        if columns > 0:
            need += max(rows, 0) * (1 + (columns * bits + 7) // 8)
    return need


def png_bytes(file: bytes, need: int) -> int:
    """Count the bytes of rows in a PNG, up to one more than `need`. Decoders paint black, or leave
    as they were, those that are missing. Raises zlib.error."""
    got, place, unpack = 0, 8, zlib.decompressobj()
    while got <= need and place + 8 <= len(file):
        length, name = struct.unpack(">I4s", file[place : place + 8])
        if name == b"IDAT":
            got += len(unpack.decompress(file[place + 8 : place + 8 + length], need + 1 - got))
        place += 12 + length
    return got
