"""The error model over seeds and prompts, against Student's t, an analysis of variance by hand and
simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flowrl.evaluation.crossed_errors import contrast_error, crossed, weights_of


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
