"""Where the sliding window starts, iteration by iteration."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms.plans.windows import _window_start

Pace = Literal["constant", "linear", "exponential"]
# 25 steps, size 4, the last two spared
MIX: dict[str, Any] = {"start": 0, "stride": 1, "last": 19, "steps": 25, "roll_back": True}


def starts(count: int, **options: Any) -> list[int]:
    return [_window_start(iteration, **options) for iteration in range(count)]


def slow(
    count: int, tau: list[int], *, start: int, stride: int, last: int, roll_back: bool
) -> list[int]:
    """Keep a position and a counter as the description says: tau[l] iterations at step l, then one
    stride."""
    at, waited, out = start, 0, []
    for _ in range(count):
        out.append(at)
        waited += 1
        if waited >= tau[at]:
            if stride and at + stride > last:
                at = 0 if roll_back else last
            else:
                at += stride
            waited = 0
    return out


def test_the_shipped_run() -> None:
    """Checklist 21: 300 iterations, tau 25, stride 1 -> floor(it / 25)."""
    assert starts(300, every=25, **MIX) == [i // 25 for i in range(300)]


def test_the_linear_pace_of_the_code() -> None:
    """By hand, 11 steps, so the line ends at step 9, with tau from 10 to 1: 10, 9, ..., 1
    iterations, 55 in all; then the round starts again."""
    options = {"every": 10, "pace": "linear", "start": 0, "stride": 1, "last": 9, "steps": 11}
    options["roll_back"] = True
    round_ = [step for step in range(10) for _ in range(10 - step)]
    assert starts(150, **options) == (round_ * 3)[:150]


def test_the_exponential_pace_of_the_code() -> None:
    """tau0 = 10 up to step 13, then ceil(10 exp(-0.1 (l - 13))): 10 10 9 8 7 7 6 at 13 to 19."""
    stays = [10] * 14 + [math.ceil(10 * math.exp(-0.1 * i)) for i in range(1, 7)]
    assert stays[13:] == [10, 10, 9, 8, 7, 7, 6]
    want = [step for step, stay in enumerate(stays) for _ in range(stay)]
    assert starts(len(want), every=10, pace="exponential", **MIX) == want
    assert starts(len(want) + 1, every=10, pace="exponential", **MIX)[-1] == 0


@pytest.mark.parametrize("roll_back", [True, False])
@pytest.mark.parametrize(
    ("start", "stride", "last"),
    [(0, 1, 19), (4, 1, 19), (3, 2, 18), (0, 4, 19), (7, 1, 7), (2, 0, 9)],
)
def test_every_pace_against_a_counter(start: int, stride: int, last: int, roll_back: bool) -> None:
    """The stays written out with fractions, 400 iterations, strides that miss the last start
    included."""
    line = [10 - 9 * Fraction(at, last + 2) for at in range(last + 1)]
    taus: dict[Pace, list[int]] = {
        "constant": [10] * (last + 1),
        "linear": [int(tau) for tau in line],
        "exponential": [math.ceil(10 * math.exp(-0.1 * max(0, at - 13))) for at in range(last + 1)],
    }
    for pace, tau in taus.items():
        options: dict[str, Any] = {"start": start, "stride": stride, "last": last}
        options["roll_back"] = roll_back
        wanted = slow(400, tau, **options)
        assert starts(400, every=10, pace=pace, steps=last + 4, **options) == wanted, pace


@given(st.data())
def test_a_pace_of_one_iteration_is_the_same_for_all(data: st.DataObject) -> None:
    """Nothing can decay below 1; the closed form of the constant pace is that of division by
    `every`."""
    last = data.draw(st.integers(0, 30))
    start, stride = data.draw(st.integers(0, last)), data.draw(st.integers(1, 8))
    every, iteration = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 5000))
    options: dict[str, Any] = {"start": start, "stride": stride, "last": last, "roll_back": True}
    options["steps"] = last + 4
    moves, before, round_ = iteration // every, (last - start) // stride + 1, last // stride + 1
    want = start + moves * stride if moves < before else (moves - before) % round_ * stride
    assert _window_start(iteration, every=every, **options) == want
    paces: list[Pace] = ["constant", "linear", "exponential"]
    assert {_window_start(iteration // every, every=1, pace=pace, **options) for pace in paces} == {
        want
    }


def test_the_knobs_of_the_exponential_pace() -> None:
    """decay 0 never shortens a stay; a large one leaves 1 iteration from the step after `hold` on,
    never 0."""
    assert starts(300, every=10, pace="exponential", decay=0.0, **MIX) == starts(
        300, every=10, **MIX
    )
    fast = starts(50, every=10, pace="exponential", hold=2, decay=50.0, **MIX)
    assert fast == [0] * 10 + [1] * 10 + [2] * 10 + [*range(3, 20), 0, 0, 0]
