"""Printed figures do not hang on the last bits of a sum."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from scriptkit import script_module

FIGURES = script_module("results/figures")


def test_a_tie_is_printed_alike_in_every_order_of_its_sum() -> None:
    """The same shares, added up from both ends, have a mean at a tie or a little beside it."""
    shares = [images / 48 for images in (20, 23, 28, 12, 4)]
    means = [20 * sum(shares), 20 * sum(reversed(shares)), 20 * math.fsum(shares)]
    assert {f"{mean:.1f}" for mean in means} == {"36.2", "36.3"}  # they differ in the last bits
    assert {FIGURES.fixed(mean) for mean in means} == {"36.3"}
    assert all(FIGURES.agrees("36.3", mean) for mean in means)
    moved = [1.25 + shift for shift in (-2e-16, -1e-12, 0.0, 1e-12, 3e-16)]
    assert {f"{value:.1f}" for value in moved} == {"1.2", "1.3"}
    assert {FIGURES.fixed(value) for value in moved} == {"1.3"}
    assert all(FIGURES.agrees(text, value) for text in ("1.2", "1.3") for value in moved)


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [(-1.25, "", "-1.3"), (1.24, "+", "+1.2"), (-0.03, "", "-0.0"), (-1e-12, "+", "+0.0")],
)
def test_signs(value: float, sign: str, text: str) -> None:
    assert FIGURES.fixed(value, sign=sign) == text


def test_what_is_further_than_half_a_digit_does_not_agree() -> None:
    assert not FIGURES.agrees("1.2", 1.2501) and not FIGURES.agrees("-3", 3.0)
    assert FIGURES.agrees("−1,234", -1234.4) and FIGURES.percent(0.1234) == "12.3 %"
    numbers = [FIGURES.fixed(value / 7) for value in range(8)]
    assert all(float(one) < float(other) for one, other in pairwise(numbers))
