"""Statistics and tables of a comparison, against hand calculations, scipy and simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisonkit import BASE, config, result, scored
from scipy import stats

from flowrl.core.errors import DataError
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.records import read_result
from flowrl.runs.compare.summary import (
    config_summary,
    detectable,
    equal_spreads,
    error_model,
    holm,
    improvement,
    iqm,
    iqm_interval,
    labels,
    mean_curve,
    packed,
    seeds_needed,
    told_apart,
)
from flowrl.runs.compare.tables import (
    accuracy_figure,
    comparison_table,
    gains_figure,
    markdown,
    notes,
    pair_table,
    power_before,
    task_table,
    terminal,
)

# -------------------------------------------------------------------------------- one config, pairs


def _summary(one: dict[str, Any], budget: str) -> dict[str, Any] | None:
    return config_summary(one, error_model([one], BASE, budget), budget)


def test_the_summary_of_a_config() -> None:
    found = _summary(config("a", [0.4, 0.5, 0.6]), "nfe")
    assert found is not None
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem([0.4, 0.5, 0.6]))
    assert found["mean"] == pytest.approx(0.5) and found["interval"] == pytest.approx([low, high])
    assert found["gain"] == pytest.approx([0.3, low - 0.2, high - 0.2])
    assert found["tasks"]["even"]["mean"] == pytest.approx(0.4) and found["tasks"]["even"]["gain"][
        0
    ] == pytest.approx(0.3)
    assert (found["seeds"], found["failed"], found["beats_base"]) == (3, 0, True)
    assert (found["nfe"], found["seconds"], found["iteration"]) == (104, 20.8, 10)
    at_b = _summary(config("a", [0.4, 0.5, 0.6]), "seconds")
    assert at_b is not None and at_b["mean"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("scores", "failed", "beats"),
    [
        ([0.4, 0.5, 0.6], (), True),
        ([0.1, 0.5, 0.6], (), False),
        ([0.1, 0.11, 0.09], (), False),
        ([0.6], (), None),
    ]
    + [([0.5, 0.51, 0.52], ("NaN",), False)],
)
def test_who_beats_the_base(
    scores: list[float], failed: tuple[str, ...], beats: bool | None
) -> None:
    """An interval around 0, one below it, a single seed, a run that failed."""
    found = _summary(config("a", scores, *failed), "nfe")
    assert found is not None and found["beats_base"] is beats and found["failed"] == len(failed)


def test_configs_are_sorted_and_failures_kept() -> None:
    r = result(
        config("x-low", [0.3, 0.31]),
        config("x-dead", [], "NaN", "NaN"),
        config("x-top", [0.5, 0.52], "NaN"),
    )
    assert [c["name"] for c in r["configs"]] == ["x-top", "x-low", "x-dead"]
    assert r["configs"][2]["summary"] == {"nfe": None, "seconds": None}
    assert r["pairs"]["nfe"]["names"] == ["x-top", "x-low"]
    json.dumps(r, allow_nan=False)


def test_pairs() -> None:
    """Three configs: p of the error model, Holm over the three, differences of means; the matrix is
    symmetric."""
    scores = {"a": [0.40, 0.42, 0.45], "b": [0.30, 0.33, 0.31], "c": [0.41, 0.44, 0.40]}
    found = result(*(config(name, s) for name, s in scores.items()))["pairs"]["nfe"]
    assert found["names"] == ["a", "c", "b"] and found["tests"] == 3 and found["error"] == "seeds"
    model = scored(**scores)
    p = []
    for x, y in ("ac", "ab", "cb"):
        value, error = model.difference(x, y)
        p.append(error.p(value))
    adjusted = holm(p)
    for matrix, values in (("p", p), ("p_holm", adjusted)):
        m = found[matrix]
        assert [m[0][1], m[0][2], m[1][2]] == pytest.approx(values)
        assert all(m[i][j] == m[j][i] for i in range(3) for j in range(3)) and m[0][0] is None
    assert found["difference"][0][2] == pytest.approx(np.mean(scores["a"]) - np.mean(scores["b"]))
    assert found["significant"] == sum(value < 0.05 for value in adjusted) == 2
    spread = np.mean([np.var(s, ddof=1) for s in scores.values()])
    assert found["spread"] == pytest.approx(math.sqrt(spread))
    least = detectable(0.05 / 3, 6) * math.sqrt(spread * 2 / 3)
    assert found["detectable"] == pytest.approx(least)
    assert found["improvement"][0][2] == 1 and found["improvement"][2][0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read as a flowrl comparison"),
        ("{}", "cannot be read as a flowrl comparison"),
        ('{"kind": "other", "format": 1}', "expected a flowrl comparison of format 1, got 'other'"),
        (
            '{"kind": "flowrl comparison", "format": 9}',
            "expected a flowrl comparison of format 1, got .*, format 9",
        ),
    ],
)
def test_another_file_is_no_result(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match=f"r.json: {said}"):
        read_result(tmp_path / "r.json")


def test_mean_curves_go_mark_by_mark() -> None:
    """Seeds 0 and 1 pass mark 1 after 50 and 51 evaluations; the base model stands at 0."""
    r = result(config("a", [0.4, 0.6]))
    points = mean_curve(r["configs"][0], BASE, "nfe")
    expected = [
        (0, 0.2, 0.2, 0.2),
        (50.5, 0.4, 0.3, 0.5),
        (104, 0.5, 0.4, 0.6),
        (200, 0.6, 0.5, 0.7),
    ]
    assert np.array(points) == pytest.approx(np.array(expected))
    assert [p.x for p in mean_curve(r["configs"][0], BASE, "seconds")] == pytest.approx(
        [0, 10.1, 20.8, 40]
    )


def test_labels() -> None:
    assert labels(["shapes-flow-grpo", "shapes-flow-cps"]) == {
        "shapes-flow-grpo": "flow-grpo",
        "shapes-flow-cps": "flow-cps",
    }
    assert labels(["flow-grpo", "flow-cps"]) == {"flow-grpo": "flow-grpo", "flow-cps": "flow-cps"}
    assert labels(["a-b", "a"]) == {"a-b": "a-b", "a": "a"}
    assert labels(["a-b"]) == {"a-b": "a-b"}


# ---------------------------------------------------------------------------------- tables, figures


def test_the_table() -> None:
    r = result(
        config("sd3-low", [0.15, 0.2, 0.25]),
        config("sd3-dead", [], "a | NaN"),
        config("sd3-top", [0.5, 0.52, 0.57], "broke"),
    )
    rows = {cells[0]: cells for cells in comparison_table(r)}
    assert list(rows) == ["method", "top", "low", "dead", "base model"]
    starred = comparison_table(result(config("a", [0.5, 0.51, 0.52])))[1]  # its interval excludes 0
    assert starred[4].endswith("*")
    pool = (np.var([15, 20, 25], ddof=1) + np.var([50, 52, 57], ddof=1)) / 2  # over both
    half = stats.t.ppf(0.975, 4) * math.sqrt(pool / 3)
    assert rows["top"][2:4] == ["4, 1 failed", f"53.0 ± {half:.1f}"]
    assert 2 * stats.t.sf(33 / math.sqrt(pool / 3), 4) < 0.0005
    assert rows["top"][5] == "< 0.001" and rows["low"][5] == "1.000"
    assert rows["low"][4].startswith("+0.0 [") and not rows["low"][4].endswith("*")
    assert rows["dead"][3:9] == ["–"] * 6 and rows["base model"][3] == "20.0"
    text = terminal(r)
    assert "Failed: sd3-dead, seed 0, after 10 iterations: a | NaN" in text
    assert "strict % at (a)" in text
    assert "largest overshoot 4.0% at (a) and 0.0% at (b)" in text  # 104 of 100, 40 of 40
    assert task_table(r, "nfe")[0] == ["method", "even", "odd one"]
    assert task_table(r, "nfe")[1][1].startswith("43.0 ±")
    # the screen has the verdict, and the p-values of pairs
    assert "Against the base model at (a): not told apart: top (+33.0, 1 failed), low (" in text
    assert 0.0005 < result_p(r) < 0.001 and "top is better at (a) than low (p 0.001)." in text
    assert "0.001*" in text.partition("pairs at (a)")[2]


def result_p(r: dict[str, Any]) -> float:
    return float(r["pairs"]["nfe"]["p_holm"][0][1])


SPREADS = {"calm": [0.60, 0.604, 0.608, 0.604], "wild": [0.30, 0.72, 0.68, 0.70]}


def test_spreads_that_differ_are_not_pooled() -> None:
    """Against scipy: Bartlett's test; Student's interval of the calm config's own four seeds, ten
    times as narrow as the pooled one; Welch's test of the pair."""
    r = result(config("calm", SPREADS["calm"]), config("wild", SPREADS["wild"]))
    pairs, calm = r["pairs"]["nfe"], next(c for c in r["configs"] if c["name"] == "calm")
    assert pairs["equal_spreads"] == pytest.approx(stats.bartlett(*SPREADS.values()).pvalue)
    assert not pairs["pooled"] and pairs["equal_spreads"] < 0.001
    own = stats.t.interval(0.95, 3, loc=0.604, scale=stats.sem(SPREADS["calm"]))
    assert calm["summary"]["nfe"]["interval"] == pytest.approx(own)
    welch = stats.ttest_ind(*SPREADS.values(), equal_var=False).pvalue
    assert pairs["p"][0][1] == pytest.approx(welch)
    said = next(line for line in notes(r) if line.startswith("The spreads over seeds at (a)"))
    assert "0.3 to 20.1" in said and "(Bartlett's test, p < 0.001)" in said
    # those that may be equal are
    r = result(config("a", [0.4, 0.5, 0.6]), config("b", [0.41, 0.52, 0.6]))
    assert r["pairs"]["nfe"]["pooled"] and not any("Bartlett" in line for line in notes(r))


def test_equal_seeds_are_no_test_of_spreads() -> None:
    assert math.isnan(equal_spreads([np.array([0.5, 0.5]), np.array([0.1, 0.9])]))
    assert math.isnan(equal_spreads([np.array([0.5]), np.array([0.1, 0.9])]))


def test_runs_that_end_below_the_base_model_are_counted() -> None:
    """The base model has 20 %; by its prompts' verdicts where these are known."""
    r = result(
        config("sd3-fell", [0.05, 0.5, 0.1, 0.6]), config("sd3-rose", [0.5, 0.6, 0.55, 0.52])
    )
    rows = {cells[0]: cells for cells in comparison_table(r)}
    assert rows["fell"][2] == "4, collapsed: 2 of 4" and rows["rose"][2] == "4"
    assert any(line.endswith("of the prompts: fell 2 of 4.") for line in notes(r))
    # 0 of 40 prompts right after 8 of 40 are fewer than chance allows, 6 of 40 are not
    tags = ["even"] * 20 + ["odd_one"] * 20
    right = {}
    for count in (0, 6, 8):
        right[count] = [[int(place % 20 < count // 2)] * 4 for place in range(40)]
    base = {**BASE, "tags": tags, "outcomes": packed(right[8])}
    fell, ends = config("a", [0.0, 0.15]), (right[0], right[6])
    for run, end in zip(fell["seeds"], ends, strict=True):
        run["at"]["nfe"] = {**run["at"]["nfe"], "outcomes": packed(end)}
    found = config_summary(fell, error_model([fell], base, "nfe"), "nfe")
    assert found is not None and found["collapsed"] == 1


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    """Two seeds of one config, 12.7 standard errors: the seeds that it takes stand there."""
    r = result(config("a", [0.35, 0.65]))
    cells = comparison_table(r)[1]
    needs = r["configs"][0]["summary"]["nfe"]["needs_seeds"]
    assert cells[3] == f"50.0 (± from {needs} seeds)" and cells[4] == "+30.0"
    # by scipy: half of the interval of so many seeds is at most 10 points, of one less above
    std = np.std([0.35, 0.65], ddof=1)
    half = {n: stats.t.ppf(0.975, n - 1) * std / math.sqrt(n) for n in (needs - 1, needs)}
    assert half[needs] <= 0.1 < half[needs - 1]
    assert any(line.startswith("Too few seeds for an interval") for line in notes(r))
    assert "±" not in task_table(r, "nfe")[1][1]
    # three seeds that agree tell something
    three = result(config("a", [0.5, 0.51, 0.52]))["configs"][0]
    assert three["summary"]["nfe"]["needs_seeds"] is None


def test_how_many_seeds_a_difference_needs() -> None:
    """By simulation: two of three configs as far apart as `told_apart` says are found in 80 of 100
    cases at Holm's strictest level; `seeds_needed` is its inverse."""
    apart, rng = told_apart(3, 4), np.random.default_rng(0)
    scores = rng.normal(0, 1, (4000, 3, 4))
    scores[:, 0] += apart
    pool = scores.var(2, ddof=1).mean(1)
    t = (scores[:, 0].mean(1) - scores[:, 1].mean(1)) / np.sqrt(pool * 2 / 4)
    assert np.mean(2 * stats.t.sf(abs(t), 9) < 0.05 / 3) == pytest.approx(0.8, abs=0.03)
    assert seeds_needed(apart + 1e-9, 3) == 4 and seeds_needed(apart - 1e-3, 3) == 5
    assert seeds_needed(0.01, 3) == 0


def test_before_it_runs_it_says_how_many_seeds_it_needs() -> None:
    """In spreads over seeds, and in points of those that the result file has."""
    first = power_before(["a", "b", "c"], 4, {"configs": []})
    assert first[0].endswith(f"lie {told_apart(3, 4):.1f} spreads over seeds apart")
    assert first[1] == (
        f"half of that takes {seeds_needed(told_apart(3, 4) / 2, 3)} seeds of each config"
    )
    again = power_before(["a", "b", "c"], 4, result(config("a", [0.4, 0.5, 0.6])))
    assert f"{100 * 0.1 * told_apart(3, 4):.1f} points" in again[0]
    assert "one seed" in power_before(["a", "b"], 1, {"configs": []})[0]


def test_the_seconds_and_other_machines_are_said() -> None:
    r = result(config("a", [0.5, 0.6]))
    assert "after 40 seconds of training" in notes(r)[0]
    r["environments"] = [{}, {}]
    assert "The runs began in 2 environments, see the result file." in notes(r)


def test_other_scores_than_shares_are_no_percentages() -> None:
    r = result(config("a", [1.4, 1.5, 1.45]))
    assert comparison_table(r)[0][3] == "strict at (a)" and comparison_table(r)[1][3].startswith(
        "1.450 ±"
    )


def test_the_matrix_of_pairs_and_the_power_are_said() -> None:
    r = result(config("sd3-a", [0.5, 0.51, 0.52]), config("sd3-b", [0.2, 0.21, 0.22]))
    rows = pair_table(r, "nfe")
    p = stats.ttest_ind([0.5, 0.51, 0.52], [0.2, 0.21, 0.22]).pvalue
    assert rows[1] == ["1 a", "", f"{p:.3f}*"] and rows[2] == ["2 b", "-30.0", ""]
    said = next(line for line in notes(r) if line.startswith("Pairs at (a)"))
    assert f"about {detectable(0.05, 4) * math.sqrt(2 / 3):.1f} apart" in said
    assert "1 of 1 differ" in said and "the spread over seeds 1.0;" in said
    text = markdown(r, ["figures/gains.png"])
    assert "| 2 b | -30.0 |  |" in text and "![figures/gains.png](figures/gains.png)" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in lines)


@pytest.mark.parametrize(
    "configs",
    [
        [config("a", [0.4])],
        [config("x-a", [0.4, 0.6]), config("x-b", [], "NaN"), config("x-c", [0.5, 0.6], "NaN")],
        [config("a", [], "NaN")],
    ],
)
def test_figures_are_drawn(configs: list[dict[str, Any]], tmp_path: Path) -> None:
    r = result(*configs)
    figures = [
        gains_figure(r),
        accuracy_figure(r, "nfe"),
        accuracy_figure(r, "seconds"),
    ]
    for number, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{number}.png", dpi=40)
    panels = figures[1].axes
    titles = labels([c["name"] for c in r["configs"]]).values()
    for axes, name, c in zip(panels, titles, r["configs"], strict=True):
        failed = c["summary"]["nfe"] is None or len(c["seeds"]) == 3
        assert axes.get_title("left") == name + (" (1 failed)" if failed else "")
    curve = panels[0].lines[-1]  # drawn last: the config's own
    points = mean_curve(r["configs"][0], BASE, "nfe")
    assert np.allclose(curve.get_ydata(), [100 * p.mean for p in points])


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
        assert error.freedom == pytest.approx(freedom) and error.p(value) == pytest.approx(expected)
    assert model.spread() == pytest.approx(math.sqrt(squares[0] / freedom))
    assert math.isnan(model.difference("a", "d")[1].half())  # one seed alone
    with pytest.raises(KeyError):
        model.spread("e")


def test_equal_scores_alone_have_no_interval() -> None:
    assert math.isnan(scored(a=[0.3, 0.3, 0.3]).score("a")[1].half())
    assert math.isnan(scored(a=[0.3]).score("a")[1].half())


def test_with_outcomes_the_error_is_of_seeds_and_prompts() -> None:
    """Against `crossed`, which has tests of its own: a gain is a mean of differences per prompt."""
    rng, tags = np.random.default_rng(0), ["even"] * 3 + ["odd_one"] * 4
    scenes = [*"0123456"]
    base = {
        **BASE,
        "tags": tags,
        "scenes": scenes,
        "outcomes": packed(rng.integers(0, 2, (7, 4)).tolist()),
    }
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


def test_prompts_of_one_scene_are_one_draw() -> None:
    """Three wordings of a scene have their images' mean and one place in the error."""
    tags = ["even"] * 4 + ["odd_one"] * 2
    scenes = ["a", "a", "a", "b", "c", "d"]
    base = {**BASE, "tags": tags, "scenes": scenes, "outcomes": "11 10 00 01 11 00"}
    mine = config("a", [0.4, 0.5])
    for run, outcomes in zip(
        mine["seeds"], ("11 11 10 01 11 10", "11 00 00 11 01 00"), strict=True
    ):
        run["at"]["nfe"] = {**run["at"]["nfe"], "outcomes": outcomes}
    model = error_model([mine], base, "nfe")
    assert model.tags == ["even", "even", "odd_one", "odd_one"]
    assert model.base.tolist() == [0.5, 0.5, 1, 0]
    expected = [[5 / 6, 0.5, 1, 0.5], [2 / 6, 1, 0.5, 0]]
    assert model.groups["a"].tolist() == pytest.approx(np.array(expected))


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
