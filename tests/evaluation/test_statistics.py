"""Means and intervals: Wilson, Student, paired bootstrap, crossed errors; strengths by
Bradley-Terry."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize

from flowrl.core.errors import ConfigError, DataError
from flowrl.evaluation.crossed_errors import contrast_error, crossed, weights_of
from flowrl.evaluation.statistics import (
    Z95,
    Result,
    bradley_terry,
    paired_bootstrap,
    resampled,
    summarize_scores,
    wilson,
)


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


def scores(prompts: int, images: int, gain: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two models on prompts of very different difficulty; `gain` apart on the mean."""
    rng = np.random.default_rng(seed)
    easy = rng.normal(0, 5, (prompts, 1))
    noise = rng.normal(0, 1, (2, prompts, images))
    return easy + gain + noise[0], easy + noise[1]


def test_one_task_is_scipys_percentile_bootstrap() -> None:
    """On the prompts' mean differences; both ends within a twentieth of the width."""
    first, second = scores(80, 4, 0.3)
    found = paired_bootstrap(first, second, ["all"] * 80)
    gaps = (first - second).mean(1)
    theirs = stats.bootstrap(
        (gaps,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found["difference"] == pytest.approx(gaps.mean())
    slack = (theirs.high - theirs.low) / 20
    assert found["interval"] == pytest.approx([theirs.low, theirs.high], abs=slack)


def test_what_makes_a_prompt_easy_drops_out() -> None:
    """Normal theory: the half width is 1.96 sqrt(2 / 4 / 400), though prompts differ by 5."""
    first, second = scores(400, 4, 0.2)
    low, high = paired_bootstrap(first, second, ["all"] * 400)["interval"]
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(2 / 4 / 400), rel=0.15)
    # the same gap on every image has no error at all
    again = paired_bootstrap(second + 0.25, second, ["all"] * 400)
    assert again["interval"] == pytest.approx([0.25, 0.25]) and again["better"] == 1
    assert paired_bootstrap(second, second, ["all"] * 400)["better"] == 0.5


def test_the_mean_is_over_tasks() -> None:
    """Two tasks of 2 and 8 prompts, apart by 1 and 0: a half, not a fifth."""
    zero, tags = np.zeros((10, 1)), ["a"] * 2 + ["b"] * 8
    ahead = zero.copy()
    ahead[:2] = 1
    found = paired_bootstrap(ahead, zero, tags)
    assert found["difference"] == 0.5 and found["interval"] == [0.5, 0.5]
    assert {tag: (t["difference"], t["prompts"]) for tag, t in found["tasks"].items()} == {
        "a": (1.0, 2),
        "b": (0.0, 8),
    }


@pytest.mark.parametrize("gain", [0.0, 0.3])
def test_nineteen_of_twenty_intervals_hold_the_truth(gain: float) -> None:
    """400 pairs of models; binomial noise of the count is 0.011, the small-sample bias of the
    percentile method about -0.02 at 40 prompts."""
    held = 0
    for seed in range(400):
        first, second = scores(40, 2, gain, seed)
        low, high = paired_bootstrap(first, second, ["all"] * 40, draws=400)["interval"]
        held += low <= gain <= high
    assert 0.89 < held / 400 < 0.98


def test_an_image_that_one_model_has_no_score_for_counts_for_neither() -> None:
    first, second = np.array([[1.0, np.nan], [3.0, 5.0]]), np.array([[0.0, 9.0], [0.0, np.nan]])
    assert paired_bootstrap(first, second, ["all"] * 2)["difference"] == 2.0
    second[0, 0] = np.nan
    with pytest.raises(DataError, match="prompt 0"):
        paired_bootstrap(first, second, ["all"] * 2)


def test_scores_of_other_images_are_refused() -> None:
    for first, second, tags in (
        (np.zeros((2, 2)), np.zeros((2, 3)), ["a"] * 2),
        (np.zeros(2), np.zeros(2), ["a"] * 2),
        (np.zeros((2, 2)), np.zeros((2, 2)), ["a"] * 3),
    ):
        with pytest.raises(DataError, match="shapes"):
            paired_bootstrap(first, second, tags)


def test_a_benchmarks_numbers_have_intervals_over_prompts() -> None:
    """Two equal images of each of 300 prompts are as one: scipy's bootstrap of the prompts' mean,
    both ends within a fifth of the width (500 draws); a number that one prompt makes has none."""
    values = np.random.default_rng(2).normal(0, 1, 300)
    prompts = [[{"value": float(value)}] * 2 for value in values]
    prompts[7] = [{**row, "rare": 1.0} for row in prompts[7]]

    def numbers(rows: list[dict[str, float]]) -> dict[str, float]:
        rare = [row["rare"] for row in rows if "rare" in row]
        return {
            "mean": float(np.mean([row["value"] for row in rows])),
            **({"rare": 1.0} if rare else {}),
        }

    found = resampled(numbers, prompts)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    slack = (theirs.high - theirs.low) / 5
    assert found["mean"] == pytest.approx((theirs.low, theirs.high), abs=slack)
    assert found["rare"] is None


# American League 1987: wins of the row over the column, 13 games a pair, and the estimates with
# Baltimore at 0 (Agresti, Categorical Data Analysis, the section on Bradley-Terry models)
TEAMS = ("Milwaukee", "Detroit", "Toronto", "New York", "Boston", "Cleveland", "Baltimore")
WINS = (
    (0, 7, 9, 7, 7, 9, 11),
    (6, 0, 7, 5, 11, 9, 9),
    (4, 6, 0, 7, 7, 8, 12),
    (6, 8, 6, 0, 6, 7, 10),
    (6, 2, 6, 7, 0, 7, 12),
    (4, 4, 5, 6, 6, 0, 6),
    (2, 4, 1, 3, 1, 7, 0),
)
PUBLISHED = (1.58, 1.44, 1.29, 1.25, 1.11, 0.68, 0.0)


def games() -> list[Result]:
    """Each game once, from the winner's side."""
    out: list[Result] = []
    for i, one in enumerate(TEAMS):
        for j, two in enumerate(TEAMS):
            out += [(one, two, 1.0)] * WINS[i][j]
    return out


def test_published_strengths_of_seven_teams() -> None:
    found = bradley_terry(games(), TEAMS[::-1], add=0)
    assert [team.score for team in found[::-1]] == pytest.approx(PUBLISHED, abs=0.006)
    assert {team.votes for team in found} == {6 * 13}


def test_two_have_the_empirical_logit_and_its_interval() -> None:
    """7 wins, 2 losses and a tie: log(7.5 + .5) - log(2.5 + .5), both sides with their halves."""
    results: list[Result] = [("a", "b", 1.0)] * 2 + [("b", "a", 1.0)] * 7 + [("a", "b", 0.5)]
    _, b = bradley_terry(results, ("a", "b"))
    error = math.sqrt(1 / 8 + 1 / 3)
    assert b.score == pytest.approx(math.log(8 / 3), abs=1e-6) and b.votes == 10
    assert (b.high - b.low) / 2 == pytest.approx(1.959964 * error, abs=1e-5)
    assert b.share()[0] == pytest.approx(8 / 11, abs=1e-6)


def test_three_are_where_another_optimiser_puts_them() -> None:
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    results: list[Result] = []
    for _ in range(60):
        i, j = rng.choice(3, 2, replace=False)
        results.append((names[i], names[j], float(rng.choice([0, 0.5, 1], p=[0.5, 0.1, 0.4]))))

    def loss(free: np.ndarray) -> float:
        s = dict(zip(names, [0.0, *free], strict=True))
        total = 0.0
        for one, two, label in results:
            gap = s[one] - s[two]
            total += label * math.log1p(math.exp(-gap)) + (1 - label) * math.log1p(math.exp(gap))
        return total

    best = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-12})
    scores = [found.score for found in bradley_terry(results, names, add=0)]
    assert scores[1:] == pytest.approx(best.x, abs=1e-5)


def test_a_clean_sweep_is_finite_and_what_was_not_compared_is_unknown() -> None:
    results: list[Result] = [("a", "b", 0.0)] * 5 + [("c", "d", 1.0)]
    _, b, c, _ = bradley_terry(results, ("a", "b", "c", "d"))
    assert b.score == pytest.approx(math.log(5.5 / 0.5), abs=1e-4) and math.isfinite(b.low)
    assert math.isnan(c.score) and c.votes == 1


@pytest.mark.parametrize("values", [np.array([[0.1], [0.4], [0.3]]), np.array([[0.1, 0.4, 0.3]])])
def test_with_seeds_or_prompts_alone_it_is_students(values: np.ndarray) -> None:
    # three seeds on one prompt, or one seed on three prompts: scipy's interval of n = 3
    flat = values.ravel()
    expected = stats.t.interval(0.95, 2, loc=flat.mean(), scale=stats.sem(flat))
    found = crossed(values, ["all"] * values.shape[1])
    assert found["mean"] == pytest.approx(flat.mean())
    assert found["interval"] == pytest.approx(expected)


def test_the_variance_by_hand() -> None:
    # 2 seeds x 3 prompts, means of seeds 2 and 5, of prompts 2, 3, 5.5; what is left is -+0.5, 0.5,
    # 0. Variances: seeds ((1.5^2) * 2) / 1 / 2 = 2.25; prompts var(2, 3, 5.5) / 3 = 13 / 12;
    # rest (4 * 0.25) / 2 / 6 = 1 / 12
    values = np.array([[0.0, 2.0, 4.0], [4.0, 4.0, 7.0]])
    error = contrast_error([values], values.mean(0), weights_of(["a"] * 3), ["a"] * 3, 1 / 2)
    parts = (2.25, 1), (13 / 12, 2), (1 / 12, 2)
    assert error.variance == pytest.approx(2.25 + 13 / 12 - 1 / 12)
    freedom = error.variance**2 / sum(variance**2 / free for variance, free in parts)
    assert error.freedom == pytest.approx(freedom)
    assert error.half() == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(3.25))


def test_intervals_hold_the_truth() -> None:
    # 4 seeds, two tasks of 12 prompts, known stds; the truth is 0.3. Of 400 intervals 95 % should
    # hold it; Satterthwaite's is an approximation, so 92 to 99 %
    rng, tags = np.random.default_rng(0), ["a"] * 12 + ["b"] * 12
    hits = []
    for _ in range(400):
        seeds, prompts = rng.normal(0, 0.03, (4, 1)), rng.normal(0, 0.12, 24)
        low, high = crossed(0.3 + seeds + prompts + rng.normal(0, 0.1, (4, 24)), tags)["interval"]
        hits.append(low <= 0.3 <= high)
    assert 0.92 <= np.mean(hits) <= 0.99


def test_tasks_weigh_the_same() -> None:
    values = np.array([[1.0, 0.0, 0.0, 0.0]])
    found = crossed(values, ["a", "b", "b", "b"])
    assert found["mean"] == pytest.approx(0.5)
    assert found["tasks"]["a"] == {"mean": 1.0, "interval": [None, None]}
