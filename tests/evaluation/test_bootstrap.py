"""The paired bootstrap, held to closed forms and to scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flowrl.core.errors import DataError
from flowrl.evaluation.statistics import paired_bootstrap, resampled


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
