"""Means and their intervals: Wilson's of verdicts, Student's of graded scores."""

from __future__ import annotations

import math
from functools import cache

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.core.errors import ConfigError
from flowrl.evaluation.statistics import Z95, summarize_scores, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_the_published_table(hits: int, n: int, low: float, high: float) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_against_scipy(numbers: tuple[int, int]) -> None:
    interval = scipy.stats.binomtest(*numbers).proportion_ci(0.95, method="wilson")
    assert wilson(*numbers) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_wilson_of_what_is_no_count() -> None:
    assert pytest.approx(scipy.stats.norm.ppf(0.975), abs=1e-15) == Z95
    for hits, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"hits={hits}, n={n}"):
            wilson(hits, n)


def test_the_interval_of_real_numbers_is_student_s() -> None:
    """Scipy's, with the sample's std; of two tasks the hypotenuse of their half widths, halved."""
    a, b = torch.tensor([0.2, 0.9, 0.4, 0.7]), torch.tensor([0.1, 0.3, 0.8])
    errors = [float(task.double().std()) / math.sqrt(len(task)) for task in (a, b)]
    half = [error * scipy.stats.t.ppf(0.975, df) for error, df in zip(errors, (3, 2), strict=True)]
    one = summarize_scores(a, ["a"] * 4)
    expected = scipy.stats.t.interval(0.95, 3, loc=0.55, scale=errors[0])
    assert one["interval"] == one["tasks"]["a"]["interval"] == pytest.approx(list(expected))
    two = summarize_scores(torch.cat([a, b]), ["a"] * 4 + ["b"] * 3)
    wide = math.hypot(*half) / 2
    assert two["mean"] == pytest.approx(0.475)
    assert two["interval"] == pytest.approx([0.475 - wide, 0.475 + wide])
    # one image: the spread of the other tasks, pooled over 3 and 2 degrees of freedom
    three = summarize_scores(torch.cat([a, b, a[:1]]), ["a"] * 4 + ["b"] * 3 + ["c"])
    squares = 3 * float(a.double().var()) + 2 * float(b.double().var())
    low, high = three["tasks"]["c"]["interval"]
    assert high - low == pytest.approx(2 * Z95 * math.sqrt(squares / 5))
    assert summarize_scores(a[:1], ["a"])["interval"] == pytest.approx([0.2, 0.2])


def test_the_interval_of_few_real_numbers_covers() -> None:
    """Of 4,000 samples of three normal numbers 95 % hold the mean, within 5 SE of .0034; the normal
    quantile and the population's std would hold 74 %."""
    draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hit = 0
    for draw in draws:
        low, high = summarize_scores(draw, ["a"] * 3)["interval"]
        hit += low <= 0 <= high
    assert abs(hit / 4000 - 0.95) < 0.017


def test_the_interval_of_verdicts() -> None:
    """One task: Wilson's. Two: squares of the distances to each end are added, each end apart."""
    one = summarize_scores(torch.tensor([1.0, 1, 1, 0]), ["a"] * 4)
    assert one["interval"] == pytest.approx(wilson(3, 4))
    two = summarize_scores(torch.tensor([1.0, 1, 1, 0, 0, 0]), ["a"] * 4 + ["b"] * 2)
    (low_a, high_a), (low_b, high_b) = wilson(3, 4), wilson(0, 2)
    below, above = math.hypot(0.75 - low_a, low_b) / 2, math.hypot(high_a - 0.75, high_b) / 2
    assert two["mean"] == 0.375 and two["interval"] == pytest.approx([0.375 - below, 0.375 + above])
    # 4 of 4 in both: not certain
    low, high = summarize_scores(torch.ones(8), ["a"] * 4 + ["b"] * 4)["interval"]
    assert high == 1 and low == pytest.approx(1 - (1 - wilson(4, 4)[0]) * math.sqrt(2) / 2)


def test_interval_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 and 10 verdicts at 0.9 and 0.6: 95 % of 2000 intervals hold 0.75, within 5 SE."""
    monkeypatch.setattr("flowrl.evaluation.statistics.wilson", cache(wilson))  # few counts differ
    tags, hit = ["a"] * 40 + ["b"] * 10, 0
    chance = torch.tensor([0.9] * 40 + [0.6] * 10)
    for draw in torch.rand(2000, 50, generator=torch.Generator().manual_seed(0)):
        low, high = summarize_scores((draw < chance).float(), tags)["interval"]
        hit += low <= 0.75 <= high
    assert abs(hit / 2000 - 0.95) < 0.024
