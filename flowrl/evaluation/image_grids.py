"""Draw grids of sample images, and keep strips of samples in a run folder. Imports PIL, no
plotting library."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.core.files import replacing

INK, QUIET, EDGE, PAPER = (34, 34, 34), (110, 110, 110), (214, 214, 214), (255, 255, 255)
# pixels: a longer side is reduced to the first, a shorter one enlarged towards the second
_LARGE, _SMALL = 256, 128
# pixels: around the page, between images, between blocks of pairs
_MARGIN, _GAP, _BLOCK_GAP = 20, 6, 36

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class _Text(NamedTuple):
    """Wrapped lines of one text and how they are set."""

    lines: list[str]
    font: Font
    pitch: int  # pixels from line to line

    @property
    def height(self) -> int:
        return self.pitch * len(self.lines)

    @property
    def width(self) -> int:
        return max((ceil(self.font.getlength(line)) for line in self.lines), default=0)


def labelled_grid(
    columns: Mapping[str, Tensor], prompts: Sequence[str], *, scale: int | None = None
) -> Image.Image:
    """Draw one row per prompt, its text at the left, and one column per entry of `columns` under
    its name.

    Args:
        columns: {header: [P, 3, H, W] in [0, 1]}, in the order of drawing.
        prompts: P texts; one too long for its row ends in an ellipsis.
        scale: whole enlargement without smoothing; by default small images grow to 96-128 pixels
            and images longer than 256 pixels are reduced to that.

    Raises DataError if shapes, counts or values do not fit.
    """
    # images as they are drawn, all of one size
    tiles = {}
    for name, images in columns.items():
        tiles[name] = _tiles(images, prompts, scale, f"column {name!r}")
    sizes = {tile.size for column in tiles.values() for tile in column}
    if len(sizes) != 1:
        raise DataError(
            f"expected columns of images of one size, got {sorted(sizes) or 'no images'}"
        )
    (width, height) = sizes.pop()
    # prompts at the left, names above
    size = _font_size(height)
    wide, most = max(170, 3 * width // 2), height // _pitch(size)
    labels = [_wrap(prompt, size, wide, most) for prompt in prompts]
    headers = [_wrap(name, size, width, 2) for name in tiles]
    # a page that holds them
    left = _MARGIN + max(label.width for label in labels) + 16
    top = _MARGIN + max(header.height for header in headers) + 8
    page, draw = _page(
        left + len(tiles) * (width + _GAP) - _GAP + _MARGIN,
        top + len(prompts) * (height + _GAP) - _GAP + _MARGIN,
    )
    # drawn row by row, then column by column
    for row, label in enumerate(labels):
        y = top + row * (height + _GAP)
        _write(draw, label, _MARGIN, y + (height - label.height) // 2)
    for index, (header, column) in enumerate(zip(headers, tiles.values(), strict=True)):
        x = left + index * (width + _GAP)
        _write(draw, header, x, top - 8 - header.height, width, QUIET)
        for row, tile in enumerate(column):
            _paste(page, draw, tile, x, top + row * (height + _GAP))
    return page


def pairs_figure(
    before: Tensor,
    after: Tensor,
    prompts: Sequence[str],
    *,
    title: str = "",
    names: tuple[str, str] = ("before", "after"),
    blocks: int = 4,
    scale: int | None = None,
) -> Image.Image:
    """Draw before/after pairs [P, 3, H, W] in [0, 1] in `blocks` blocks side by side, each prompt
    under its pair.

    The first ceil(P / blocks) prompts stand in the first block, and so on; `scale` as in
    `labelled_grid`. Raises DataError if shapes, counts or values do not fit.
    """
    if blocks < 1:
        raise DataError(f"expected blocks >= 1, got {blocks}")
    # images as they are drawn, all of one size
    sides = [_tiles(before, prompts, scale, repr(names[0]))]
    sides.append(_tiles(after, prompts, scale, repr(names[1])))
    (width, height), pair = sides[0][0].size, 2 * sides[0][0].width + _GAP
    if sides[1][0].size != (width, height):
        raise DataError(
            f"expected pairs of one size, got {list(before.shape)} before and {list(after.shape)} "
            "after"
        )
    # rows and blocks; four blocks of six prompts are three full ones
    rows = -(-len(prompts) // blocks)
    blocks = -(-len(prompts) // rows)
    # texts, and the height that each row needs
    size = _font_size(height)
    captions = [_wrap(prompt, size, pair, 3) for prompt in prompts]
    heights = []
    for row in range(rows):
        heights.append(height + 7 + max(c.height for c in captions[row::rows]) + 14)
    full = blocks * pair + (blocks - 1) * _BLOCK_GAP
    heading = _wrap(title, size * 3 // 2, full, 3)
    headers = [_wrap(name, size, width, 1) for name in names]
    # a page that holds all
    top = _MARGIN + heading.height + (14 if title else 0) + headers[0].height + 6
    page, draw = _page(full + 2 * _MARGIN, top + sum(heights) - 14 + _MARGIN)
    # drawn pair by pair
    _write(draw, heading, _MARGIN, _MARGIN)
    for index, caption in enumerate(captions):
        block, row = divmod(index, rows)
        x, y = _MARGIN + block * (pair + _BLOCK_GAP), top + sum(heights[:row])
        for side, (tiles, header) in enumerate(zip(sides, headers, strict=True)):
            at = x + side * (width + _GAP)
            _paste(page, draw, tiles[index], at, y)
            if row == 0:
                _write(draw, header, at, top - 6 - header.height, width, QUIET)
        _write(draw, caption, x, y + height + 7)
    return page


def save_strip(images: Tensor, path: str | os.PathLike[str]) -> None:
    """Write images [P, 3, H, W] in [0, 1] under each other into one PNG [P*H, W], all of it or
    nothing.

    Raises DataError if they are no such images, RunError if the file cannot be written.
    """
    save_png(Image.fromarray(np.concatenate(list(_bytes(images, os.fspath(path))))), path)


def load_strip(path: str | os.PathLike[str], count: int) -> Tensor:
    """Read `count` images from a strip: -> [count, 3, H, W] float32 in [0, 1]. Raises RunError if
    it holds others."""
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises all three on damaged files
        raise RunError(
            f"{path}: expected a PNG of {count} images, cannot read it: {error}"
        ) from error
    if count < 1 or len(pixels) % count:
        raise RunError(
            f"{path}: expected {count} images of one height, got {len(pixels)} rows of pixels"
        )
    images = torch.from_numpy(pixels).reshape(count, -1, pixels.shape[1], 3)
    return images.permute(0, 3, 1, 2).float() / 255


def save_png(image: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write an image, all of it or nothing; missing folders are made. Raises RunError if that
    fails."""
    with replacing(path) as draft:
        image.save(draft, format="PNG", optimize=True)


def _bytes(images: Tensor, where: str) -> np.ndarray:
    """[P, 3, H, W] in [0, 1] -> [P, H, W, 3] uint8."""
    if images.ndim != 4 or images.shape[1] != 3 or not images.numel():
        raise DataError(f"{where}: expected images [P, 3, H, W], got {list(images.shape)}")
    images = images.detach().float().cpu()
    if not bool(((images >= 0) & (images <= 1)).all()):  # written so that NaN fails too
        low, high = images.min().item(), images.max().item()
        raise DataError(
            f"{where}: expected images in [0, 1], got values from {low:.4g} to {high:.4g}"
        )
    return (images * 255).round().byte().permute(0, 2, 3, 1).numpy()


def _tiles(
    images: Tensor, prompts: Sequence[str], scale: int | None, where: str
) -> list[Image.Image]:
    # one for each prompt
    if len(images) != len(prompts):
        raise DataError(
            f"{where}: expected one image for each of {len(prompts)} prompts, got {len(images)}"
        )
    if scale is not None and scale < 1:
        raise DataError(f"expected scale >= 1, got {scale}")
    # smaller, smoothly
    tiles = [Image.fromarray(image) for image in _bytes(images, where)]
    long = max(tiles[0].size)
    if scale is None and long > _LARGE:
        small = tuple(max(1, round(side * _LARGE / long)) for side in tiles[0].size)
        return [image.resize((small[0], small[1]), Image.Resampling.LANCZOS) for image in tiles]
    # or larger, without smoothing
    factor = scale or max(1, _SMALL // long)
    width, height = tiles[0].size
    grown = (width * factor, height * factor)
    return [image.resize(grown, Image.Resampling.NEAREST) for image in tiles]


def _font_size(height: int) -> int:
    return min(22, max(12, height // 8))


def _pitch(size: int) -> int:
    return round(1.3 * size)


def _wrap(text: str, size: int, width: int, most: int) -> _Text:
    """Break a text into at most `most` lines no wider than `width` pixels; the rest becomes an
    ellipsis."""
    # line by line; a line has no more letters than pixels
    font = _font(size, text.isascii())
    lines: list[str] = []
    rest, most = " ".join(text.split()), max(1, most)
    while rest and len(lines) <= most:
        end = max(1, _fitting(rest[: width + 1], font, width))
        space = rest.rfind(" ", 0, end + 1)
        if end < len(rest) and space > 0:  # else a word wider than the line is cut
            end = space
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    # an ellipsis for what is left
    if len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: most - 1], last.rstrip() + "…"]
    return _Text(lines, font, _pitch(size))


def _fitting(text: str, font: Font, width: int) -> int:
    """Return how many letters at the start of a text fit into `width` pixels."""
    letters = range(1, len(text) + 1)
    return bisect.bisect_right(letters, width, key=lambda n: ceil(font.getlength(text[:n])))


@functools.lru_cache
def _font(size: int, ascii_only: bool) -> Font:
    """Return PIL's own font, or for other letters than it has the one that comes with matplotlib,
    where installed."""
    found = None if ascii_only else importlib.util.find_spec("matplotlib")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), size=size)
    return ImageFont.load_default(size=size)


def _page(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    page = Image.new("RGB", (width, height), PAPER)
    return page, ImageDraw.Draw(page)


def _write(
    draw: ImageDraw.ImageDraw,
    text: _Text,
    x: int,
    y: int,
    width: int | None = None,
    fill: tuple[int, int, int] = INK,
) -> None:
    """Write lines from the corner (x, y) down, centred where a width is given."""
    for index, line in enumerate(text.lines):
        indent = 0 if width is None else (width - text.font.getlength(line)) // 2
        draw.text((x + indent, y + index * text.pitch), line, fill=fill, font=text.font)


def _paste(page: Image.Image, draw: ImageDraw.ImageDraw, tile: Image.Image, x: int, y: int) -> None:
    """Place an image with a hairline around it, so that a white one still has an edge."""
    draw.rectangle((x - 1, y - 1, x + tile.width, y + tile.height), outline=EDGE)
    page.paste(tile, (x, y))
