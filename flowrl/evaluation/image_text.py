"""Text on images: wrapped into lines, and written."""

from __future__ import annotations

import bisect
import functools
import importlib.util
from math import ceil
from pathlib import Path
from typing import NamedTuple

from PIL import ImageDraw, ImageFont

INK, QUIET = (34, 34, 34), (110, 110, 110)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


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
    found = None if ascii_only else importlib.util.find_spec("matplotlib")
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
        indent = 0 if width is None else (width - text.font.getlength(line)) // 2
        draw.text((x + indent, y + index * text.pitch), line, fill=fill, font=text.font)
