"""Intervals of result files are those of the outcomes beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparisonkit import config, result
from scipy import stats
from scriptkit import module_of

from flowrl.runs.compare.summary import (
    ErrorModel,
    config_summary,
    equal_spreads,
    error_model,
    needed_for_interval,
)


def again() -> Any:
    return module_of("results", "again")


def test_the_files_are_what_their_outcomes_give() -> None:
    module = again()
    gains, kept = module.read(module.GAINS), module.read(module.OUTCOMES)["comparisons"]
    assert close(module.gains_again(gains, kept), gains)
    bound = {config for one in kept.values() for config in one["rows"]}
    assert bound and bound <= {row["config"] for row in gains["rows"]}
    # what the table on equal terms has is shown there alone
    taken = {entry["file"] for entry in module.read(module.TABLE)["configs"]}
    assert not taken & {row["config"] for row in gains["rows"]}
    # a row that is not of its outcomes is found
    wrong = {**gains, "rows": [{**row, "gain": row["gain"] + 1e-4} for row in gains["rows"]]}
    with pytest.raises(ValueError, match="by the outcomes of"):
        module.gains_again(wrong, kept)


def close(one: Any, two: Any) -> bool:
    """Compare files, numbers up to rounding."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(close(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(close, one, two))
    return bool(one == two or (isinstance(one, float) and one == pytest.approx(two, abs=2e-6)))


def test_what_is_kept_of_a_comparison_gives_its_summary() -> None:
    """Three images a prompt: digits are how many are right; intervals are those of the whole
    result."""
    found = result(config("a", [0.4, 0.5, 0.6]), config("b", [0.1, 0.2, 0.3]))
    rng = np.random.default_rng(0)

    def draw() -> str:
        rows = ["".join(map(str, rng.integers(0, 2, 3))) for _ in range(12)]
        return " ".join(rows)

    found["base"] |= {"tags": ["even"] * 6 + ["odd_one"] * 6, "outcomes": draw()}
    for entry in found["configs"]:
        entry["file"] = f"x/{entry['name']}"
        for run in entry["seeds"]:
            run["at"]["nfe"] = {**run["at"]["nfe"], "outcomes": draw()}
    module = again()
    kept = module.outcomes_of(found, ["x/a"])
    assert kept["tasks"] == [["even", 6], ["odd_one", 6]] and kept["images"] == 3
    model, whole = module.model_of(kept), error_model(found["configs"], found["base"], "nfe")
    summary = config_summary(found["configs"][0], whole, "nfe")
    assert summary is not None
    gain, error = model.gain(found["configs"][0]["file"])
    expected = [gain, gain - error.half(), gain + error.half()]
    assert summary["gain"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="verdicts"):
        module.hits("0.5,1, 0.25,")


def test_arms_whose_spreads_differ_forty_times() -> None:
    """Each arm has its own interval where Bartlett's test says that spreads differ: pooled, a calm
    arm could not be told from the base model."""
    tags, steps = ["one"] * 24, np.array([[-1.0], [0.0], [1.0]])
    groups = {
        "calm": np.full((3, 24), 0.60) + 0.004 * steps,
        "quiet": np.full((3, 24), 0.58) + 0.006 * steps,
        "wild": np.full((3, 24), 0.55) + 0.177 * steps,
    }
    equal_p = equal_spreads([group.mean(1) for group in groups.values()])
    assert equal_p == pytest.approx(stats.bartlett(*(g.mean(1) for g in groups.values())).pvalue)
    base = np.full(24, 0.5)
    model = ErrorModel(groups, base, tags, True, equal_p)
    assert equal_p < 0.001 and not model.pooled
    gains = {name: model.gain(name) for name in groups}
    assert gains["calm"][0] == pytest.approx(0.1) and gains["calm"][0] > gains["calm"][1].half()
    assert 0 < gains["wild"][0] < gains["wild"][1].half()
    # one spread for all, and the calm arm's gain is not seen
    pooled = ErrorModel(groups, base, tags, True, 1.0)
    assert pooled.pooled and pooled.gain("calm")[0] < pooled.gain("calm")[1].half()
    # seeds until the half interval is 0.1: 2.145 * 0.177 / sqrt(15) is 0.098; 14 give 0.102
    assert needed_for_interval(model, "calm") is None
    assert needed_for_interval(model, "wild") == 15
