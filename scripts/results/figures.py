"""Figures as text, the same on every processor; and how they are put into pages.

A mean that is worked out again differs in its last bits with the order of its sum, which differs
between processors. At a tie, such as 1.25 for one digit, those bits would decide what is printed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

NOISE = 1e-9
"""More than what the order of a sum changes, less than any printed digit."""


def fixed(value: float, digits: int = 1, sign: str = "") -> str:
    """Write a number with so many digits behind the point; a tie goes away from zero, also one that
    rounding errors moved a little to either side."""
    step = Decimal(1).scaleb(-digits)
    near = Decimal(f"{value:.9f}") + 0  # nothing has no sign; what is below it keeps its own
    return f"{near.quantize(step, ROUND_HALF_UP):{sign}f}"


def points(share: float, sign: str = "+") -> str:
    """Write a difference of shares in points, with its sign."""
    return fixed(100 * share, sign=sign)


def percent(share: float) -> str:
    """Write a share as percent."""
    return f"{points(share, '')} %"


def agrees(text: str, value: float) -> bool:
    """Say whether a printed number is `value` rounded to as many digits, either way at a tie."""
    said = Decimal(text.replace("−", "-").replace(",", ""))
    exponent = said.as_tuple().exponent
    assert isinstance(exponent, int)
    half = 0.5 * 10.0**exponent
    return abs(float(said) - value) <= half + NOISE


def between(text: str, start: str, end: str, parts: Sequence[str], gap: str = "\n\n") -> str:
    """Put parts between two marks; a page without the marks stays as it is."""
    new = gap.join([f"<!-- {start} -->", *parts, f"<!-- {end} -->"])
    marks = f"<!-- {re.escape(start)} -->\n.*?<!-- {re.escape(end)} -->"
    return re.sub(marks, lambda _: new, text, flags=re.DOTALL)


def wrapped(text: str, indent: str = "") -> str:
    """Break a text into lines of at most 100 columns."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
