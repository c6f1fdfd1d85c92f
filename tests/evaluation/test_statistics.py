"""Means and intervals: Wilson, Student over prompts, paired differences, crossed errors, and how
often they hold the truth; strengths by Bradley-Terry."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.stats
import torch
from docskit import ROOT
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize
from scriptkit import script_module

from flowrl.core.errors import ConfigError, DataError
from flowrl.evaluation.crossed_errors import (
    MORE,
    Error,
    Groups,
    MeanSquare,
    contrast_error,
    crossed,
    prompt_part,
    seed_part,
    weights_of,
)
from flowrl.evaluation.statistics import (
    Z95,
    Result,
    bradley_terry,
    decided_by,
    jackknifed,
    paired_difference,
    summarize_scores,
    wilson,
)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_against_scipy(numbers: tuple[int, int]) -> None:
    interval = scipy.stats.binomtest(*numbers).proportion_ci(0.95, method="wilson")
    assert wilson(*numbers) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_wilson_of_what_is_no_count() -> None:
    assert pytest.approx(scipy.stats.norm.ppf(0.975), abs=1e-15) == Z95
    for hits, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"hits={hits}, n={n}"):
            wilson(hits, n)


def students(values: np.ndarray) -> float:
    """Return half of scipy's interval of one task, with two prompts more and the skewness."""
    n, t = len(values), float(stats.t.isf(0.025, len(values) - 1))
    skew = abs(stats.skew(values, bias=False)) / math.sqrt(n) if n > 2 else 0.0
    longer = (t + skew * (2 * t**2 + 1) / 6) / t
    half = stats.t.interval(0.95, n - 1, loc=0, scale=stats.sem(values))[1]
    return float(half * longer * math.sqrt(1 + MORE / n))


def test_the_interval_of_real_numbers_is_student_s() -> None:
    """Scipy's, with two prompts more; several images of a prompt are as one."""
    a = np.array([0.2, 0.9, 0.4, 0.7])
    one = summarize_scores(torch.from_numpy(a), ["a"] * 4)
    half = students(a)
    assert one["interval"] == one["tasks"]["a"]["interval"]
    assert one["interval"] == pytest.approx([0.55 - half, 0.55 + half])
    again = summarize_scores(
        torch.from_numpy(a).repeat_interleave(3), ["a"] * 12, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    )
    assert again["interval"] == pytest.approx(one["interval"]) and again["images"] == 12


def test_tasks_of_one_prompt_have_the_spread_of_the_others() -> None:
    a, b = np.array([0.2, 0.9, 0.4, 0.7]), np.array([0.1, 0.3, 0.8])
    three = summarize_scores(
        torch.from_numpy(np.concatenate([a, b, a[:1]])), ["a"] * 4 + ["b"] * 3 + ["c"]
    )
    # pooled over 3 and 2 degrees of freedom, and two prompts more beside the one
    pooled = (3 * a.var(ddof=1) + 2 * b.var(ddof=1)) / 5
    low, high = three["tasks"]["c"]["interval"]
    part = prompt_part(np.concatenate([a, b, a[:1]]), np.eye(8)[7], ["a"] * 4 + ["b"] * 3 + ["c"])
    assert part.variance == pytest.approx(pooled * (1 + MORE)) and part.freedom == 5
    assert (high - low) / 2 > stats.t.isf(0.025, 5) * math.sqrt(pooled)
    # one prompt alone says nothing of others
    assert summarize_scores(torch.from_numpy(a[:1]), ["a"])["interval"] == [None, None]


def test_the_interval_of_verdicts() -> None:
    """It is over prompts: sixteen images of four prompts are four values. Where all are right it
    still has a width, about 3 / n, and what cannot lie above 1 ends there."""
    means = np.array([1.0, 0.5, 0.75, 0.25])
    images = torch.tensor([1.0] * 4 + [1, 1, 0, 0] + [1, 1, 1, 0] + [1, 0, 0, 0])
    rows = [prompt for prompt in range(4) for _ in range(4)]
    one = summarize_scores(images, ["a"] * 16, rows)
    half = students(means)
    assert one["mean"] == 0.625
    assert one["interval"] == pytest.approx([max(0, 0.625 - half), min(1, 0.625 + half)])
    low, high = summarize_scores(torch.ones(160), ["a"] * 80 + ["b"] * 80)["interval"]
    assert high == 1 and 1 - low == pytest.approx(1.975 * math.sqrt(2) / 160, rel=0.01)


def test_the_headline_s_interval_is_that_of_the_table() -> None:
    """Of one config of one seed: the error model of a comparison on the same verdicts."""
    rng, tags = np.random.default_rng(0), ["a"] * 12 + ["b"] * 12
    images = (rng.random((24, 8)) < 0.6).astype(float)
    rows = np.repeat(np.arange(24), 8).tolist()
    found = summarize_scores(torch.from_numpy(images.ravel()), list(np.repeat(tags, 8)), rows)
    expected = crossed(images.mean(1)[None], tags)
    assert found["interval"] == pytest.approx(expected["interval"])
    assert found["tasks"]["a"]["interval"] == pytest.approx(expected["tasks"]["a"]["interval"])


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """All laws of scripts/bench/coverage.py: rare verdicts, skewed scores, few prompts, tasks that
    differ, two noisy seeds. At least 93 of 100, less what 1,000 sets leave to chance (3 standard
    errors of .0081). The result file has the same laws."""
    bench = script_module("bench/coverage")
    cases = list(bench.cases(1000, seed=1))
    missed = {(one.name, one.prompts, one.seeds): one.held for one in cases if one.held < 0.906}
    assert len(cases) > 80 and missed == {}
    # with as many prompts as a test list has they are not much wider than the law itself asks for
    plain = [one.width for one in cases if one.name == "normal" and one.prompts == 120]
    assert 0.95 < plain[0] < 1.1
    # the result file
    found = json.loads((ROOT / "assets/results/coverage.json").read_text(encoding="utf-8"))
    names = {row["name"] for row in found["rows"]}
    assert names == {one.name for one in cases}
    assert found["sets"] >= 10_000 and found["least"] == min(row["held"] for row in found["rows"])
    assert found["least"] >= 0.93


def scores(prompts: int, images: int, gain: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two models on prompts of very different difficulty; `gain` apart on the mean."""
    rng = np.random.default_rng(seed)
    easy = rng.normal(0, 5, (prompts, 1))
    noise = rng.normal(0, 1, (2, prompts, images))
    return easy + gain + noise[0], easy + noise[1]


def test_one_task_is_students() -> None:
    """On the prompts' mean differences."""
    first, second = scores(80, 4, 0.3)
    found, gaps = paired_difference(first, second, ["all"] * 80), (first - second).mean(1)
    assert found["difference"] == pytest.approx(gaps.mean())
    half = students(gaps)
    assert found["interval"] == pytest.approx([gaps.mean() - half, gaps.mean() + half])
    # p is the level at which the interval ends at 0
    error = Error(
        MeanSquare(0, 0), prompt_part(gaps, np.full(80, 1 / 80), ["all"] * 80), MeanSquare(0, 0)
    )
    assert error.half(found["p"]) == pytest.approx(abs(gaps.mean()))
    plain = stats.ttest_1samp(gaps, 0).pvalue
    assert plain < found["p"] < 3 * plain


def test_what_makes_a_prompt_easy_drops_out() -> None:
    """Normal theory: the half width is 1.96 sqrt(2 / 4 / 400), though prompts differ by 5."""
    first, second = scores(400, 4, 0.2)
    low, high = paired_difference(first, second, ["all"] * 400)["interval"]
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(2 / 4 / 400), rel=0.15)
    # the same gap on every image has no error at all
    again = paired_difference(second + 0.25, second, ["all"] * 400)
    assert again["interval"] == pytest.approx([0.25, 0.25])
    assert paired_difference(second, second, ["all"] * 400)["p"] == 1
    # verdicts that never differ leave about 3 in n
    same = np.ones((100, 4))
    found = paired_difference(same, same, ["all"] * 100)
    assert found["interval"][1] == -found["interval"][0] == pytest.approx(0.028, abs=0.0005)
    # one prompt says nothing of others
    one = paired_difference(first[:1], second[:1], ["all"])
    assert one["interval"] == [None, None] and one["p"] is None


def test_the_mean_is_over_tasks() -> None:
    """Two tasks of 2 and 8 prompts, apart by 2 and 0: 1, not two fifths."""
    zero, tags = np.zeros((10, 1)), ["a"] * 2 + ["b"] * 8
    ahead = zero.copy()
    ahead[:2] = 2
    found = paired_difference(ahead, zero, tags)
    assert found["difference"] == 1 and found["interval"] == [1, 1]
    assert {tag: (t["difference"], t["prompts"]) for tag, t in found["tasks"].items()} == {
        "a": (2.0, 2),
        "b": (0.0, 8),
    }


def test_an_image_that_one_model_has_no_score_for_counts_for_neither() -> None:
    first, second = np.array([[1.0, np.nan], [3.0, 5.0]]), np.array([[0.0, 9.0], [0.0, np.nan]])
    assert paired_difference(first, second, ["all"] * 2)["difference"] == 2.0
    second[0, 0] = np.nan
    with pytest.raises(DataError, match="prompt 0"):
        paired_difference(first, second, ["all"] * 2)


def test_scores_of_other_images_are_refused() -> None:
    for first, second, tags in (
        (np.zeros((2, 2)), np.zeros((2, 3)), ["a"] * 2),
        (np.zeros(2), np.zeros(2), ["a"] * 2),
        (np.zeros((2, 2)), np.zeros((2, 2)), ["a"] * 3),
    ):
        with pytest.raises(DataError, match="shapes"):
            paired_difference(first, second, tags)


def test_a_benchmarks_numbers_have_intervals_over_prompts() -> None:
    """Two equal images of each of 300 prompts are as one: of a mean the jackknife is Student's; a
    number that one prompt makes has none, and right images alone leave about 3 in n."""
    values = np.random.default_rng(2).normal(0, 1, 300)
    prompts = [[{"value": float(value)}] * 2 for value in values]
    prompts[7] = [{**row, "rare": 1.0} for row in prompts[7]]

    def numbers(rows: list[dict[str, float]]) -> dict[str, float]:
        rare = [row["rare"] for row in rows if "rare" in row]
        return {
            "mean": float(np.mean([row["value"] for row in rows])),
            **({"rare": 1.0} if rare else {}),
        }

    found, half = jackknifed(numbers, prompts), students(values)
    assert found["mean"] == pytest.approx((values.mean() - half, values.mean() + half))
    assert found["rare"] is None
    right = [[{"value": 1.0}] for _ in range(50)]
    low, high = jackknifed(numbers, right, 1.0)["mean"] or (0, 0)
    assert (high - low) / 2 == pytest.approx(2.01 * math.sqrt(2) / 50, rel=0.01)


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


def test_with_seeds_or_prompts_alone_it_is_students() -> None:
    """Three seeds on one prompt: scipy's interval of n = 3; one seed on three prompts: as over
    prompts alone."""
    flat = np.array([0.1, 0.4, 0.3])
    expected = stats.t.interval(0.95, 2, loc=flat.mean(), scale=stats.sem(flat))
    found = crossed(flat[:, None], ["all"])
    assert found["mean"] == pytest.approx(flat.mean())
    assert found["interval"] == pytest.approx(expected)
    half = students(flat)
    found = crossed(flat[None], ["all"] * 3)
    assert found["interval"] == pytest.approx([flat.mean() - half, flat.mean() + half])


def test_the_variance_by_hand() -> None:
    # 2 seeds x 3 prompts, means of seeds 2 and 5, of prompts 2, 3, 5.5; what is left is -+0.5, 0.5,
    # 0. Variances: seeds ((1.5^2) * 2) / 1 / 2 = 2.25; prompts var(2, 3, 5.5) / 3 = 13 / 12, two
    # prompts more are 5 / 3 of it; rest (4 * 0.25) / 2 / 6 = 1 / 12
    values = np.array([[0.0, 2.0, 4.0], [4.0, 4.0, 7.0]])
    tags, prompts = ["a"] * 3, 13 / 12 * 5 / 3
    error = contrast_error(Groups([values], [1 / 2]), values.mean(0), weights_of(tags), tags)
    assert error.variance == pytest.approx(2.25 + prompts - 1 / 12)
    assert error.prompts[:2] == pytest.approx((prompts, 2)) and error.seeds == (2.25, 1, 0)
    # each part has its own factor (Banerjee), that of prompts with their skewness
    t, n = stats.t.isf(0.025, 2), np.array([2, 3, 5.5])
    t += stats.skew(n, bias=False) / math.sqrt(3) * (2 * t**2 + 1) / 6
    squared = stats.t.isf(0.025, 1) ** 2 * 2.25 + t**2 * (prompts - 1 / 12)
    assert error.half() == pytest.approx(math.sqrt(squared))
    assert stats.t.isf(0.025, error.freedom) * math.sqrt(error.variance) == pytest.approx(
        error.half()
    )
    assert error.half(error.p(1.7)) == pytest.approx(1.7) and error.p(0.0) == 1
    assert error.p(math.nan) == 0


def test_own_spreads_are_welch_s() -> None:
    """Of two groups of seeds without prompts: scipy's test of unequal variances."""
    one, two = np.array([0.1, 0.5, 0.2, 0.9]), np.array([0.31, 0.3, 0.33])
    groups = Groups([one[:, None], two[:, None]], [1 / 4, 1 / 3], equal=False)
    part = seed_part(groups, np.ones(1))
    error, gap = Error(part, MeanSquare(0, 0), MeanSquare(0, 0)), one.mean() - two.mean()
    assert error.p(gap) == pytest.approx(stats.ttest_ind(one, two, equal_var=False).pvalue)


def test_values_of_other_prompts_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 prompts, got shape \[1, 3\]"):
        crossed(np.zeros((1, 3)), ["a", "b"])


def test_tasks_weigh_the_same() -> None:
    values = np.array([[1.0, 0.2, 0.4, 0.3]])
    found = crossed(values, ["a", "b", "b", "b"])
    assert found["mean"] == pytest.approx(0.65)
    assert found["tasks"]["a"]["mean"] == 1.0


def test_which_change_so_many_images_decide() -> None:
    """The width of the interval of a difference of two binomial shares of a half, by simulation."""
    rng = np.random.default_rng(0)
    gaps = np.diff(rng.binomial(528, 0.5, (20_000, 2)) / 528)
    said = float(np.quantile(np.abs(gaps), 0.95))
    assert decided_by(528).startswith("528 images decide a change of right images above about 6")
    assert said == pytest.approx(0.06, abs=0.002) and "half of that takes 2,112" in decided_by(528)
