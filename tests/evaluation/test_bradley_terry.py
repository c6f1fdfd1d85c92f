"""Bradley-Terry strengths against closed forms, published estimates and scipy's own optimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from flowrl.evaluation.statistics import Result, bradley_terry

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
