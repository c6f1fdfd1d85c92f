"""Statistics of a comparison: errors, intervals, Holm, power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from comparisonkit import BASE, config, scored
from scipy import stats

from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.records import packed
from flowrl.runs.compare.summary import (
    detectable,
    error_model,
    holm,
    improvement,
    iqm,
    iqm_interval,
)

# --------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("values", [[0.1, 0.4, 0.3], [1.0, 2.0], [-5.0, 3.0, 3.5, 8.0, 1.0]])
def test_the_interval_of_one_config_is_students(values: list[float]) -> None:
    """Against scipy's interval of the t distribution with n - 1 degrees of freedom."""
    mean, error = scored(a=values).score("a")
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )
    assert mean == pytest.approx(np.mean(values)) and error.half() == pytest.approx(
        (high - low) / 2
    )


def test_the_pooled_error_is_a_contrast_of_least_squares() -> None:
    """Oracle: regress all scores on a dummy per config; its residual variance and covariance give t
    and freedom. Intervals and pairs have the same error."""
    samples = {"a": [0.42, 0.45, 0.47], "b": [0.31, 0.40], "c": [0.2, 0.28, 0.22, 0.25], "d": [0.5]}
    sizes = [len(some) for some in samples.values()]
    design = np.repeat(np.eye(4), sizes, axis=0)
    scores = np.concatenate(list(samples.values()))
    fitted, squares, rank, _ = np.linalg.lstsq(design, scores, rcond=None)
    freedom = len(scores) - rank
    model = scored(**samples)
    for contrast, (value, error) in (
        (np.array([1.0, 0.0, -1.0, 0.0]), model.difference("a", "c")),
        (np.array([0.0, 1.0, 0.0, 0.0]), model.score("b")),
    ):
        variance = contrast @ np.linalg.inv(design.T @ design) @ contrast * squares[0] / freedom
        expected = 2 * stats.t.sf(abs(contrast @ fitted) / math.sqrt(variance), freedom)
        assert error.freedom == freedom and error.p(value) == pytest.approx(expected)
    assert model.spread() == pytest.approx(math.sqrt(squares[0] / freedom))
    assert math.isnan(model.difference("a", "d")[1].half())  # one seed alone


def test_equal_scores_alone_have_no_interval() -> None:
    assert math.isnan(scored(a=[0.3, 0.3, 0.3]).score("a")[1].half())
    assert math.isnan(scored(a=[0.3]).score("a")[1].half())


def test_with_outcomes_the_error_is_of_seeds_and_prompts() -> None:
    """Against `crossed`, which has tests of its own: a gain is a mean of differences per prompt."""
    rng, tags = np.random.default_rng(0), ["even"] * 3 + ["odd_one"] * 4
    base = {**BASE, "tags": tags, "outcomes": packed(rng.integers(0, 2, (7, 4)).tolist())}
    mine, values = config("a", [0.4, 0.5, 0.6]), []
    for run in mine["seeds"]:
        verdicts = rng.integers(0, 2, (7, 4))
        values.append(verdicts.mean(1))
        run["at"]["nfe"] = {**run["at"]["nfe"], "outcomes": packed(verdicts.tolist())}
    model = error_model([mine], base, "nfe")
    assert model.prompts and not error_model([mine], BASE, "nfe").prompts
    expected = crossed(np.array(values) - model.base, tags)
    gain, error = model.gain("a")
    assert [gain - error.half(), gain + error.half()] == pytest.approx(expected["interval"])
    task, error = model.gain("a", "even")
    assert task + error.half() == pytest.approx(expected["tasks"]["even"]["interval"][1])


def test_means_over_tasks_and_who_improves() -> None:
    """By hand: of 1 ... 8 the middle half is 3 to 6, mean 4.5. Seeds 1, 3 against 2, 2 on one task:
    half of the pairs; 5, 5 against 5, 4 on the other: one pair is more, the ties count half."""
    assert iqm(np.arange(1.0, 9.0).reshape(2, 4)) == 4.5
    one, other = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[2.0, 5.0], [2.0, 4.0]])
    assert improvement(one, other) == pytest.approx((0.5 + 0.75) / 2)
    # the bootstrap's spread of a mean of many is that of the mean: std / sqrt n, here of the
    # middle half of normal scores, whose efficiency is 0.84 (Rosenberger and Gasko 1983)
    scores = np.random.default_rng(0).normal(0, 1, (400, 1))
    low, high = iqm_interval(scores)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(400 * 0.84), rel=0.15)


def test_holm_by_hand() -> None:
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 = 0.02, 0.03, 0.06, 0.04; the last may not
    fall below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    adjusted = holm([0.01, math.nan, 0.04])  # two tests, not three
    assert adjusted[::2] == pytest.approx([0.02, 0.04]) and math.isnan(adjusted[1])
    assert holm([]) == []


def test_what_a_t_test_can_detect() -> None:
    """Cohen (1988): 64 per group find half a std with a power of 0.80 at 5 %; and 3 per group by
    simulation."""
    assert detectable(0.05, 126) * math.sqrt(2 / 64) == pytest.approx(0.5, abs=0.002)
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 1, (2000, 15, 3))
    scores[:, 0] += detectable(0.05 / 3, 2 * 15) * math.sqrt(2 / 3)
    # Student's test with the variance pooled over all 15
    pool = scores.var(2, ddof=1).mean(1)
    t = (scores[:, 0].mean(1) - scores[:, 1].mean(1)) / np.sqrt(pool * 2 / 3)
    found = 2 * stats.t.sf(abs(t), 2 * 15) < 0.05 / 3
    assert np.mean(found) == pytest.approx(0.8, abs=0.036)  # 4 standard errors
