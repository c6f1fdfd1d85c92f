"""Images as a judge's server gets them: data URLs, the cells of an image that is a grid, and the
image that an edit started from."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch

from .._common.scorer import to_pil

MOST_CELLS = 16  # more is no grid but a size in pixels, such as 512x512
_GRID = re.compile(r"(\d+)\s*[x×\u2a09]\s*(\d+)")


class EncodedImage(NamedTuple):
    """An image file for a request."""

    url: str  # data URL
    digest: str  # sha256 of the file


def encode(image: Image.Image, encoding: str) -> EncodedImage:
    """Write an image as JPEG of quality 95 (what UnifiedReward's code sends) or as lossless PNG."""
    file = io.BytesIO()
    if encoding == "png":
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=95)
    data = file.getvalue()
    return EncodedImage(
        f"data:image/{encoding};base64,{base64.b64encode(data).decode('ascii')}",
        hashlib.sha256(data).hexdigest(),
    )


def grid_size(prompt: str, where: str, who: str = "rewards.vlm") -> tuple[int, int]:
    """Return rows and columns from the first "AxB" of a prompt (PaCo-RL). Raises DataError if it
    names no grid."""
    found = _GRID.search(prompt)
    rows, columns = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 2 <= rows * columns <= MOST_CELLS:
        raise DataError(
            f"{where}: {who}: expected a grid of 2 to {MOST_CELLS} cells in the prompt, such as "
            f'"2x2", got {prompt[:120]!r}'
        )
    return rows, columns


def cut(image: Image.Image, rows: int, columns: int, who: str = "rewards.vlm") -> list[Image.Image]:
    """Cut an image into equal cells, row by row; pixels left over at the right and bottom are
    dropped (PaCo-RL). Raises DataError for one that is too small."""
    width, height = image.width // columns, image.height // rows
    if not width or not height:
        raise DataError(
            f"{who}: an image of {image.width}x{image.height} cannot be cut into {rows}x{columns}"
        )
    corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
    return [image.crop((x, y, x + width, y + height)) for x, y in corners]


def needs_source(record: Mapping[str, Any], where: str, who: str) -> None:
    """Refuse a record that names no source. Raises DataError."""
    if not record.get("source"):
        raise DataError(
            f"{where}: {who}: expected a record with a source, the image that the edit starts from"
        )


def first_source(batch: RewardBatch, place: int, who: str) -> Image.Image:
    """Return the first image that image `place` started from. Raises DataError if there is none."""
    sources = batch.source[place] if batch.source else ()
    if not sources:
        raise DataError(f"{who}: image {place} comes without its source; edits have one")
    return to_pil(sources[0][None])[0]
