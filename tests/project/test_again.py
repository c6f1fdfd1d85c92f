"""Intervals of result files are those of the outcomes beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comparisonkit import config, result
from scriptkit import module_of

from flowrl.runs.compare.summary import config_summary, error_model, needed_for_interval


def again() -> Any:
    return module_of("results", "again")


def test_the_files_are_what_their_outcomes_give() -> None:
    module = again()
    demonstration = module.read(module.DEMONSTRATION)
    gains, kept = module.read(module.GAINS), module.read(module.OUTCOMES)["comparisons"]
    assert close(module.gains_again(gains, kept, demonstration), gains)
    bound = {config for one in kept.values() for config in one["rows"]}
    assert len(bound) > 45 and bound <= {row["config"] for row in gains["rows"]}
    # a row that is not of its outcomes is found
    wrong = {**gains, "rows": [{**row, "gain": row["gain"] + 1e-4} for row in gains["rows"]]}
    with pytest.raises(ValueError, match="by the outcomes of"):
        module.gains_again(wrong, kept, demonstration)


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


def test_twelve_arms_whose_spreads_differ_forty_times() -> None:
    """Six methods as published and as tuned: Bartlett's p is 3e-13, so each arm has its own
    interval."""
    module = again()
    model = module.model_of(module.read(module.OUTCOMES)["comparisons"]["six"])
    assert model.equal_p == pytest.approx(2.7e-13, rel=0.05) and not model.pooled
    folder = "scripts/research/six/{}.yaml"
    spreads = sorted(model.spread(name) for name in model.groups)
    assert spreads[0] == pytest.approx(0.004, abs=5e-4)
    assert spreads[-1] == pytest.approx(0.177, abs=5e-4)
    # pooled, the calm arms could not be told from the base model, and the wild ones could
    for arm in ("published_mix_grpo", "tuned_branch_grpo"):
        gain, error = model.gain(folder.format(arm))
        assert gain > error.half()
    gain, error = model.gain(folder.format("tuned_diffusion_nft"))
    assert gain < 0 < gain + error.half()
    assert needed_for_interval(model, folder.format("tuned_awm")) is None
