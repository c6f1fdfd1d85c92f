"""Figures as text, the same on every processor.

A mean that is worked out again differs in its last bits with the order of its sum, which differs
between processors. At a tie, such as 1.25 for one digit, those bits would decide what is printed.
"""

from __future__ import annotations

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
