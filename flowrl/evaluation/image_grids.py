"""Draw grids of sample images with their texts, and keep strips of samples in a run folder.

Imports PIL, no plotting library.
"""

from __future__ import annotations

import bisect
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.files import replacing
from flowrl.evaluation.image_strips import read_strip

EDGE, PAPER = (214, 214, 214), (255, 255, 255)
RIGHT, WRONG = (30, 150, 70), (205, 45, 45)  # frames of images that were judged
_FRAMES = {None: (1, EDGE), True: (3, RIGHT), False: (3, WRONG)}  # by verdict: pixels, colour
# pixels: a longer side is reduced to the first, a shorter one enlarged towards the second
_LARGE, _SMALL = 256, 128
FRAMES = 6  # of a film strip
# pixels: around the page, between images, between blocks of pairs
_MARGIN, _GAP = 20, 6

INK, QUIET = (34, 34, 34), (110, 110, 110)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def labelled_grid(
    columns: Mapping[str, Tensor],
    prompts: Sequence[str],
    *,
    right: Mapping[str, Sequence[bool | None]] | None = None,
    starts: Tensor | None = None,
) -> Image.Image:
    """Draw one row per prompt, its text at the left, and one column per entry of `columns` under
    its name. Small images grow to 96-128 pixels, without smoothing, and images longer than 256
    pixels are reduced to that.

    Args:
        columns: {header: [P, 3, H, W] in [0, 1]}, or of videos [P, T, 3, H, W], of which some
            frames stand side by side; in the order of drawing.
        prompts: P texts; one too long for its row ends in an ellipsis.
        right: {header: [P]}, for columns that were judged: a green frame for a right image, a red
            one for a wrong one, none for None.
        starts: [P, K, 3, H, W], the K images that each row starts from: a first column, "source",
            in which they stand side by side, each as large as an image or frame of the others.

    Raises DataError if shapes, counts or values do not fit.
    """
    # images as they are drawn; the last column is one of samples
    tiles = _columns(columns, prompts, starts)
    width, height = next(reversed(tiles.values()))[0].size
    # prompts at the left, names above
    size = font_size(height)
    wide, most = max(170, 3 * width // 2), height // pitch_of(size)
    labels = [wrapped(prompt, size, wide, most) for prompt in prompts]
    widths = [column[0].width for column in tiles.values()]
    headers = [wrapped(name, size, w, 2) for name, w in zip(tiles, widths, strict=True)]
    # a page that holds them
    left = _MARGIN + max(label.width for label in labels) + 16
    top = _MARGIN + max(header.height for header in headers) + 8
    page, draw = _page(
        left + sum(widths) + (len(widths) - 1) * _GAP + _MARGIN,
        top + len(prompts) * (height + _GAP) - _GAP + _MARGIN,
    )
    # drawn row by row, then column by column
    for row, label in enumerate(labels):
        y = top + row * (height + _GAP)
        write_lines(draw, label, _MARGIN, y + (height - label.height) // 2)
    for index, (header, (name, column)) in enumerate(zip(headers, tiles.items(), strict=True)):
        x = left + sum(widths[:index]) + index * _GAP
        write_lines(draw, header, x, top - 8 - header.height, widths[index], QUIET)
        verdicts = (right or {}).get(name, [None] * len(column))
        for row, (tile, verdict) in enumerate(zip(column, verdicts, strict=True)):
            _paste(page, draw, tile, x, top + row * (height + _GAP), verdict)
    return page


def save_strip(images: Tensor, path: str | os.PathLike[str]) -> None:
    """Write images [P, 3, H, W] in [0, 1] under each other into one PNG [P*H, W], all of it or
    nothing; of videos [P, T, 3, H, W] some frames, side by side.

    Raises DataError if they are no such images, RunError if the file cannot be written.
    """
    rows, where = images, os.fspath(path)
    if images.ndim == 5:
        rows = torch.cat(list(some_frames(images).transpose(0, 1)), dim=3)
    save_png(Image.fromarray(np.concatenate(list(_bytes(rows, where)))), path)


def load_strip(path: str | os.PathLike[str], count: int, width: int | None = None) -> Tensor:
    """Read `count` images from a strip: -> [count, 3, H, W] float32 in [0, 1]. Raises RunError if
    it holds others.

    With the `width` of an image, a strip that is several times as wide is one of videos: ->
    [count, T, 3, H, W].
    """
    # [count, H, W, 3] bytes -> [count, 3, H, W] in [0, 1]
    rows = torch.from_numpy(read_strip(path, count))
    images = rows.permute(0, 3, 1, 2).float() / 255
    # the frames of a video stand side by side
    if width and images.shape[3] > width and not images.shape[3] % width:
        return torch.stack(images.split(width, dim=3), 1)
    return images


def save_png(image: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write an image, all of it or nothing; missing folders are made. Raises RunError if that
    fails."""
    with replacing(path) as draft:
        image.save(draft, format="PNG", optimize=True)


def page_format(path: str | os.PathLike[str]) -> str:
    """Return PIL's name of the format that a file's name asks for, PNG without an ending. Raises
    ConfigError if PIL writes none of that ending."""
    ending = Path(path).suffix.lower()
    found = "PNG"
    if ending:
        found = Image.registered_extensions().get(ending, "")
    if found not in Image.SAVE:
        raise ConfigError(f"{path}: no image can be written as {ending}; take .png, .jpg or .webp")
    return found


def save_page(image: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write an image as `save_png` does, in the format of the file's name. Raises as `page_format`
    and `save_png` do."""
    kind = page_format(path)
    if kind == "PNG":
        save_png(image, path)
        return
    best: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
    with replacing(path) as draft:
        image.save(draft, format=kind, **best.get(kind, {}))


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
    images: Tensor, prompts: Sequence[str], where: str, large: int = _LARGE
) -> list[Image.Image]:
    """Return images, or film strips of videos [P, T, 3, H, W], as they are drawn."""
    if images.ndim == 5:
        return _strips(some_frames(images), prompts, where, large // 2)
    # one for each prompt
    if len(images) != len(prompts):
        raise DataError(
            f"{where}: expected one image for each of {len(prompts)} prompts, got {len(images)}"
        )
    # smaller, smoothly
    tiles = [Image.fromarray(image) for image in _bytes(images, where)]
    long = max(tiles[0].size)
    if long > large:
        small = tuple(max(1, round(side * large / long)) for side in tiles[0].size)
        return [image.resize((small[0], small[1]), Image.Resampling.LANCZOS) for image in tiles]
    # or larger, without smoothing
    factor = max(1, _SMALL // long)
    width, height = tiles[0].size
    grown = (width * factor, height * factor)
    return [image.resize(grown, Image.Resampling.NEAREST) for image in tiles]


def _columns(
    columns: Mapping[str, Tensor],
    prompts: Sequence[str],
    starts: Tensor | None,
) -> dict[str, list[Image.Image]]:
    """Return the columns of `labelled_grid` as they are drawn, that of the sources first."""
    # all columns of samples have one size
    tiles = {}
    for name, images in columns.items():
        tiles[name] = _tiles(images, prompts, f"column {name!r}")
    sizes = {tile.size for column in tiles.values() for tile in column}
    if len(sizes) != 1:
        raise DataError(
            f"expected columns of images of one size, got {sorted(sizes) or 'no images'}"
        )
    if starts is None:
        return tiles
    # a source is as large as a sample, or as a frame of one
    large = _LARGE
    if any(images.ndim == 5 for images in columns.values()):
        large = _LARGE // 2
    sources, height = _strips(starts, prompts, "column 'source'", large), sizes.pop()[1]
    if sources[0].height != height:
        raise DataError(
            f"column 'source': expected images as high as the samples, got {list(starts.shape)}, "
            f"drawn {sources[0].height} pixels high beside {height}"
        )
    return {"source": sources, **tiles}


def _strips(videos: Tensor, prompts: Sequence[str], where: str, large: int) -> list[Image.Image]:
    """Put the frames of each video [P, T, 3, H, W] side by side, none longer than `large`."""
    columns = []
    for frame in videos.transpose(0, 1):
        columns.append(_tiles(frame, prompts, where, large))
    strips = []
    for row in zip(*columns, strict=True):
        width, height = row[0].size
        strip = Image.new("RGB", (len(row) * (width + 2) - 2, height), PAPER)
        for place, tile in enumerate(row):
            strip.paste(tile, (place * (width + 2), 0))
        strips.append(strip)
    return strips


def some_frames(videos: Tensor) -> Tensor:
    """Return evenly spaced frames of videos [P, T, 3, H, W], the first and the last among them ->
    [P, up to FRAMES, 3, H, W]."""
    count = videos.shape[1]
    places = torch.linspace(0, count - 1, min(count, FRAMES)).round().long()
    return videos[:, places]


def _page(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    page = Image.new("RGB", (width, height), PAPER)
    return page, ImageDraw.Draw(page)


def _paste(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    tile: Image.Image,
    x: int,
    y: int,
    right: bool | None = None,
) -> None:
    """Place an image with a hairline around it, so that a white one still has an edge, or with the
    frame of its verdict."""
    wide, color = _FRAMES[right]
    box = (x - wide, y - wide, x + tile.width + wide - 1, y + tile.height + wide - 1)
    draw.rectangle(box, outline=color, width=wide)
    page.paste(tile, (x, y))


class Text(NamedTuple):
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


def font_size(height: int) -> int:
    """Return the size of letters beside images of a height."""
    return min(22, max(12, height // 8))


def pitch_of(size: int) -> int:
    """Return the pixels from line to line."""
    return round(1.3 * size)


def wrapped(text: str, size: int, width: int, most: int) -> Text:
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
    return Text(lines, font, pitch_of(size))


def _fitting(text: str, font: Font, width: int) -> int:
    """Return how many letters at the start of a text fit into `width` pixels."""
    letters = range(1, len(text) + 1)
    return bisect.bisect_right(letters, width, key=lambda n: ceil(font.getlength(text[:n])))


@functools.lru_cache
def _font(size: int, ascii_only: bool) -> Font:
    """Return PIL's own font, or for other letters than it has the one that comes with matplotlib,
    where installed."""
    if ascii_only:
        return ImageFont.load_default(size=size)
    found = importlib.util.find_spec("matplotlib")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), size=size)
    return ImageFont.load_default(size=size)


def write_lines(
    draw: ImageDraw.ImageDraw,
    text: Text,
    x: int,
    y: int,
    width: int | None = None,
    fill: tuple[int, int, int] = INK,
) -> None:
    """Write lines from the corner (x, y) down, centred where a width is given."""
    for index, line in enumerate(text.lines):
        left: float = x
        if width is not None:
            left += (width - text.font.getlength(line)) // 2
        draw.text((left, y + index * text.pitch), line, fill=fill, font=text.font)
