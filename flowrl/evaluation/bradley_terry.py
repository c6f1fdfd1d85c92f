"""How much better is one than the other, from votes on pairs: the Bradley-Terry model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

Result = tuple[str, str, float]  # two names, and 1 where the first won, 0 the second, 0.5 a tie


class Strength(NamedTuple):
    """One competitor against the first one: log-odds of being preferred, with its 95 % interval;
    NaN where no chain of votes connects the two."""

    name: str
    score: float
    low: float
    high: float
    votes: int  # that it took part in

    def share(self) -> tuple[float, float, float]:
        """Return how often it is preferred to the first one: the expected share, low, high."""
        return float(expit(self.score)), float(expit(self.low)), float(expit(self.high))


def bradley_terry(
    results: Iterable[Result], names: Sequence[str], *, add: float = 0.5
) -> list[Strength]:
    """Fit ``log(p_ij / (1 - p_ij)) = s_i - s_j`` to results by maximum likelihood -> the strength
    of each name, that of the first one 0.

    Source: Bradley and Terry (1952); a tie is half a win for both. `add` wins are added to both
    sides of every pair that was compared, so that a clean sweep has a finite score: of two names
    this is the empirical logit ``log((w1 + 1/2) / (w2 + 1/2))`` with the standard error
    ``sqrt(1/(w1 + 1/2) + 1/(w2 + 1/2))`` (Agresti, Categorical Data Analysis). Standard errors are
    of the Fisher information. Votes count as independent: many votes of one person, or on one
    prompt, tell less than the interval says.
    """
    place = {name: i for i, name in enumerate(names)}
    wins, count = np.zeros((len(names),) * 2), np.zeros(len(names), int)
    # wins[i, j]: how often i won over j; a tie is half a win for both
    for one, two, label in results:
        i, j = place[one], place[two]
        wins[i, j] += label
        wins[j, i] += 1 - label
        count[[i, j]] += 1
    wins += add * ((wins + wins.T) > 0)
    # who never met the others, not even by way of third ones, has no place on their scale
    known = _connected(wins + wins.T > 0)
    score, error = np.full(len(names), math.nan), np.full(len(names), math.nan)
    score[0] = error[0] = 0.0
    if len(known) > 1:
        score[known[1:]], error[known[1:]] = _fit(wins[np.ix_(known, known)])
    found = []
    # 1.96 standard errors to each side: 95 %
    for name, s, e, n in zip(names, score.tolist(), error.tolist(), count.tolist(), strict=True):
        found.append(Strength(name, s, s - 1.959964 * e, s + 1.959964 * e, n))
    return found


def _fit(wins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maximise the likelihood of wins [K, K] -> strengths and standard errors [K - 1], without the
    first."""
    # only differences count, so the first score is held at 0 and the others are free
    games = wins + wins.T

    def share(free: np.ndarray) -> np.ndarray:
        score = np.concatenate([[0.0], free])
        return expit(score[:, None] - score[None, :])

    def loss(free: np.ndarray) -> float:
        return float(-(wins * np.log(share(free))).sum())

    def slope(free: np.ndarray) -> np.ndarray:
        return -(wins - games * share(free)).sum(1)[1:]

    def information(free: np.ndarray) -> np.ndarray:
        p = share(free)
        weight = games * p * (1 - p)
        return (np.diag(weight.sum(1)) - weight)[1:, 1:]

    # convex, with exact derivatives: Newton's method finds its one minimum
    start = np.zeros(len(wins) - 1)
    best = minimize(loss, start, jac=slope, hess=information, method="trust-exact").x
    return best, np.sqrt(np.diag(np.linalg.inv(information(best))))


def _connected(met: np.ndarray) -> list[int]:
    """Return the places that a chain of comparisons connects with the first one, in order."""
    found = {0}
    while True:
        more = {j for i in found for j in np.flatnonzero(met[i]).tolist()} | found
        if more == found:
            return sorted(found)
        found = more
