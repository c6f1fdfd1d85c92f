"""Figures of the docs that are made from result files, each with the numbers that it shows.

Pixels differ with fonts and with matplotlib's version, numbers do not: they are kept as text in the
PNG, so that one look tells whether a figure shows what a result file says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from PIL import Image

from flowrl.core.files import replacing

KEY = "Numbers"  # of the PNG's text
DPI = 110
DIGITS = 4  # of a number that is kept
NEAR = 1.5 * 10**-DIGITS  # a tie may be rounded either way
Numbers = dict[str, Any]


class Picture(NamedTuple):
    """A PNG, the numbers that it shows, and what draws them."""

    path: Path
    numbers: Numbers
    draw: Callable[[Numbers], Figure]

    def true(self) -> bool:
        """Say whether the file is there and shows these numbers."""
        return near(shown(self.path), rounded(self.numbers))

    def write(self) -> None:
        """Draw the figure, whole or not at all."""
        numbers = rounded(self.numbers)
        text = json.dumps(numbers, separators=(",", ":"), ensure_ascii=True)
        figure = self.draw(numbers)
        with replacing(self.path) as draft:
            # without the version of matplotlib, so that equal pixels are equal bytes
            metadata = {KEY: text, "Software": None}
            figure.savefig(draft, format="png", dpi=DPI, metadata=metadata)


def shown(path: Path) -> Numbers | None:
    """Return the numbers that a PNG holds; None where there are none."""
    if not path.exists():
        return None
    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(KEY)
    return None if text is None else dict(json.loads(text))


def rounded(value: Any) -> Any:
    """Round all numbers in a JSON value as they are kept."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    return value


def near(one: Any, other: Any) -> bool:
    """Compare JSON values, numbers but for their rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return None not in (one, other) and abs(one - other) <= NEAR
    return bool(one == other)
