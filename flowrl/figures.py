"""Draw grids of sample pictures, and keep strips of samples in a run folder. Imports PIL, no plotting library."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import json
import os
import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.errors import DataError, RunError

SAMPLES, PROMPTS = "samples", "prompts.json"
INK, QUIET, EDGE, PAPER = (34, 34, 34), (110, 110, 110), (214, 214, 214), (255, 255, 255)
_LARGE, _SMALL = 256, 128  # pixels: a longer side is reduced to the first, a shorter one enlarged towards the second
_MARGIN, _GAP, _BLOCK_GAP = 20, 6, 36  # pixels: around the page, between pictures, between blocks of pairs

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


def labelled_grid(columns: Mapping[str, Tensor], prompts: Sequence[str], *, scale: int | None = None) -> Image.Image:
    """Draw one row per prompt, its text at the left, and one column per entry of `columns` under its name.

    Args:
        columns: {header: [P, 3, H, W] in [0, 1]}, in the order of drawing.
        prompts: P texts; one too long for its row ends in an ellipsis.
        scale: whole enlargement without smoothing; by default small pictures grow to 96-128 pixels and pictures
            longer than 256 pixels are reduced to that.

    Raises DataError if shapes, counts or values do not fit.
    """
    tiles = {name: _tiles(images, prompts, scale, f"column {name!r}") for name, images in columns.items()}
    sizes = {tile.size for column in tiles.values() for tile in column}
    if len(sizes) != 1:
        raise DataError(f"expected columns of pictures of one size, got {sorted(sizes) or 'no pictures'}")
    (width, height) = sizes.pop()
    size = _font_size(height)
    labels = [_wrap(prompt, size, max(170, 3 * width // 2), height // _pitch(size)) for prompt in prompts]
    headers = [_wrap(name, size, width, 2) for name in tiles]
    left = _MARGIN + max(label.width for label in labels) + 16
    top = _MARGIN + max(header.height for header in headers) + 8
    page, draw = _page(
        left + len(tiles) * (width + _GAP) - _GAP + _MARGIN, top + len(prompts) * (height + _GAP) - _GAP + _MARGIN
    )
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
    """Draw before/after pairs [P, 3, H, W] in [0, 1] in `blocks` blocks side by side, each prompt under its pair.

    The first ceil(P / blocks) prompts stand in the first block, and so on; `scale` as in `labelled_grid`.
    Raises DataError if shapes, counts or values do not fit.
    """
    if blocks < 1:
        raise DataError(f"expected blocks >= 1, got {blocks}")
    sides = [_tiles(x, prompts, scale, repr(name)) for x, name in zip((before, after), names, strict=True)]
    (width, height), pair = sides[0][0].size, 2 * sides[0][0].width + _GAP
    if sides[1][0].size != (width, height):
        raise DataError(f"expected pairs of one size, got {list(before.shape)} before and {list(after.shape)} after")
    rows = -(-len(prompts) // blocks)
    blocks = -(-len(prompts) // rows)  # four blocks of six prompts are three full ones
    size = _font_size(height)
    captions = [_wrap(prompt, size, pair, 3) for prompt in prompts]
    heights = [height + 7 + max(c.height for c in captions[row::rows]) + 14 for row in range(rows)]
    full = blocks * pair + (blocks - 1) * _BLOCK_GAP
    heading, headers = _wrap(title, size * 3 // 2, full, 3), [_wrap(name, size, width, 1) for name in names]
    top = _MARGIN + heading.height + (14 if title else 0) + headers[0].height + 6
    page, draw = _page(full + 2 * _MARGIN, top + sum(heights) - 14 + _MARGIN)
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


def run_grid(run: str | os.PathLike[str], *, max_columns: int = 8) -> Image.Image:
    """Draw the samples of a run: its fixed prompts down, evenly spaced checkpoints across, first and last included.

    Raises RunError if the folder holds no samples or a damaged one, DataError if `max_columns` is below 2.
    """
    if max_columns < 2:
        raise DataError(f"expected max_columns >= 2, for the first and the last checkpoint, got {max_columns}")
    folder = Path(run) / SAMPLES
    files = sample_files(run)
    if not files:
        raise RunError(f"{folder} holds no samples: expected 000000.png, 000020.png ... as a training run writes them")
    prompts, shape = _prompts(folder / PROMPTS)
    order = sorted(files)
    if len(order) > max_columns:
        order = [order[round(i * (len(order) - 1) / (max_columns - 1))] for i in range(max_columns)]
    columns = {}
    for iteration in order:
        images = load_strip(files[iteration], len(prompts))
        if tuple(images.shape[2:]) != shape:
            raise RunError(
                f"{files[iteration]}: expected {len(prompts)} pictures of height and width {shape} as {PROMPTS} says, "
                f"got {tuple(images.shape[2:])}; remove the file if it is another run's"
            )
        columns[f"iter {iteration}" if iteration else "before"] = images
    return labelled_grid(columns, prompts)


def sample_files(run: str | os.PathLike[str]) -> dict[int, Path]:
    """Return {iteration: strip} of a run folder; empty without samples. Raises RunError if there is no such folder."""
    if not Path(run).is_dir():
        raise RunError(f"{run} is not a run folder: no such folder")
    found = (Path(run) / SAMPLES).glob("*.png")
    return {int(file.stem): file for file in sorted(found) if re.fullmatch(r"[0-9]{6,}", file.stem)}


def save_strip(images: Tensor, path: str | os.PathLike[str]) -> None:
    """Write pictures [P, 3, H, W] in [0, 1] under each other into one PNG [P*H, W], all of it or nothing.

    Raises DataError if they are no such pictures, RunError if the file cannot be written.
    """
    save_png(Image.fromarray(np.concatenate(list(_bytes(images, os.fspath(path))))), path)


def load_strip(path: str | os.PathLike[str], count: int) -> Tensor:
    """Read `count` pictures from a strip: -> [count, 3, H, W] float32 in [0, 1]. Raises RunError if it holds others."""
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises all three on damaged files
        raise RunError(f"{path}: expected a PNG of {count} pictures, cannot read it: {error}") from error
    if count < 1 or len(pixels) % count:
        raise RunError(f"{path}: expected {count} pictures of one height, got {len(pixels)} rows of pixels")
    return torch.from_numpy(pixels).reshape(count, -1, pixels.shape[1], 3).permute(0, 3, 1, 2).float() / 255


def save_png(image: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a picture, all of it or nothing; missing folders are made. Raises RunError if that fails."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            image.save(partial, format="PNG", optimize=True)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _prompts(path: Path) -> tuple[list[str], tuple[int, int]]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        prompts, shape = record["prompts"], (int(record["height"]), int(record["width"]))
        if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompts must be a list of texts")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'{path}: expected {{"prompts": [...], "height": H, "width": W}}, {type(error).__name__}: {error}'
        ) from error
    return prompts, shape


def _bytes(images: Tensor, where: str) -> np.ndarray:
    """[P, 3, H, W] in [0, 1] -> [P, H, W, 3] uint8."""
    if images.ndim != 4 or images.shape[1] != 3 or not images.numel():
        raise DataError(f"{where}: expected pictures [P, 3, H, W], got {list(images.shape)}")
    images = images.detach().float().cpu()
    if not bool(((images >= 0) & (images <= 1)).all()):  # written so that NaN fails too
        low, high = images.min().item(), images.max().item()
        raise DataError(f"{where}: expected pictures in [0, 1], got values from {low:.4g} to {high:.4g}")
    return (images * 255).round().byte().permute(0, 2, 3, 1).numpy()


def _tiles(images: Tensor, prompts: Sequence[str], scale: int | None, where: str) -> list[Image.Image]:
    if len(images) != len(prompts):
        raise DataError(f"{where}: expected one picture for each of {len(prompts)} prompts, got {len(images)}")
    if scale is not None and scale < 1:
        raise DataError(f"expected scale >= 1, got {scale}")
    pictures = [Image.fromarray(picture) for picture in _bytes(images, where)]
    long = max(pictures[0].size)
    if scale is None and long > _LARGE:
        small = tuple(max(1, round(side * _LARGE / long)) for side in pictures[0].size)
        return [picture.resize((small[0], small[1]), Image.Resampling.LANCZOS) for picture in pictures]
    factor = scale or max(1, _SMALL // long)
    width, height = pictures[0].size
    return [picture.resize((width * factor, height * factor), Image.Resampling.NEAREST) for picture in pictures]


def _font_size(height: int) -> int:
    return min(22, max(12, height // 8))


def _pitch(size: int) -> int:
    return round(1.3 * size)


def _wrap(text: str, size: int, width: int, most: int) -> _Text:
    """Break a text into at most `most` lines no wider than `width` pixels; the rest becomes an ellipsis."""
    font = _font(size, text.isascii())
    lines: list[str] = []
    rest, most = " ".join(text.split()), max(1, most)
    while rest and len(lines) <= most:
        start = rest[: width + 1]  # no more letters than pixels
        end = max(
            1, bisect.bisect_right(range(1, len(start) + 1), width, key=lambda n: ceil(font.getlength(start[:n])))
        )
        space = rest.rfind(" ", 0, end + 1)
        if end < len(rest) and space > 0:  # else a word wider than the line is cut
            end = space
        lines.append(rest[:end])
        rest = rest[end:].lstrip()
    if len(lines) > most:
        last = lines[most - 1]
        while last and font.getlength(last + "…") > width:
            last = last[:-1]
        lines = [*lines[: most - 1], last.rstrip() + "…"]
    return _Text(lines, font, _pitch(size))


@functools.lru_cache
def _font(size: int, ascii_only: bool) -> Font:
    """Return PIL's own font, or for other letters than it has the one that comes with matplotlib, where installed."""
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
    draw: ImageDraw.ImageDraw, text: _Text, x: int, y: int, width: int | None = None, fill: tuple[int, int, int] = INK
) -> None:
    """Write lines from the corner (x, y) down, centred where a width is given."""
    for index, line in enumerate(text.lines):
        indent = 0 if width is None else (width - text.font.getlength(line)) // 2
        draw.text((x + indent, y + index * text.pitch), line, fill=fill, font=text.font)


def _paste(page: Image.Image, draw: ImageDraw.ImageDraw, tile: Image.Image, x: int, y: int) -> None:
    """Place a picture with a hairline around it, so that a white one still has an edge."""
    draw.rectangle((x - 1, y - 1, x + tile.width, y + tile.height), outline=EDGE)
    page.paste(tile, (x, y))
