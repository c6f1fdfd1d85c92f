"""The statistics of a comparison, worked out from its result file alone: no file, no model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from flowrl.core.errors import DataError

BUDGETS = ("nfe", "seconds")
LETTERS = {"nfe": "(a)", "seconds": "(b)"}
LEVEL, POWER = 0.05, 0.8
Result = dict[str, Any]


class Point(NamedTuple):
    """One place of a mean curve: the same mark of every seed that reached it."""

    x: float
    mean: float
    low: float  # lowest seed
    high: float  # highest seed


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of the 95 % Student interval of the mean.

    The ends are NaN for one value, and for equal ones: that few images count alike does not make
    a mean certain. Raises DataError without values.
    """
    if not values:
        raise DataError("student: expected at least one value, got none")
    mean, n = float(np.mean(values)), len(values)
    if n == 1 or np.ptp(values) == 0:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def pooled(samples: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the variance within samples, pooled over all of them, and its degrees of freedom.

    ``sum of (n - 1) s^2 / sum of (n - 1)``, the error term of a one-way analysis of variance; NaN
    without any freedom.
    """
    freedom = sum(len(sample) - 1 for sample in samples if sample)
    squares = sum(float(np.var(sample)) * len(sample) for sample in samples if sample)
    return squares / freedom if freedom else math.nan, freedom


def t_test(a: Sequence[float], b: Sequence[float], variance: float, freedom: int) -> float:
    """Return the two-sided p-value of Student's t-test of equal means, the variance being known to
    some freedom.

    NaN with fewer than two values on a side, or without any variance.
    """
    if min(len(a), len(b)) < 2 or not variance > 0:
        return math.nan
    t = (float(np.mean(a)) - float(np.mean(b))) / math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    return float(2 * stats.t.sf(abs(t), freedom))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for testing all of them (Holm 1979); a NaN is no test and stays NaN."""
    known = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    out, floor = [math.nan] * len(p), 0.0
    for rank, (value, place) in enumerate(known):
        floor = max(floor, min(1.0, value * (len(known) - rank)))
        out[place] = floor
    return out


def detectable(n: int, level: float, freedom: int, power: float = POWER) -> float:
    """Return the difference, in stds, that a two-sided t-test of n against n values finds with
    probability `power`.

    From the noncentral t distribution with the freedom of the variance, 2 n - 2 if that is of these
    values alone; NaN for n < 2.
    """
    if n < 2:
        return math.nan
    edge = float(stats.t.ppf(1 - level / 2, freedom))

    def missing(d: float) -> float:
        return float(stats.nct.sf(edge, freedom, d * math.sqrt(n / 2))) - power

    return float(optimize.brentq(missing, 1e-6, 1e4))


def ranked(configs: Sequence[Result], budget: str = "nfe") -> list[Result]:
    """Sort configs by their mean at a budget, best first; those without a value come last."""

    def key(config: Result) -> tuple[bool, float, str]:
        found = config["summary"][budget]
        return found is None, -found["mean"] if found else 0.0, config["name"]

    return sorted(configs, key=key)


def summarize(result: Result) -> Result:
    """Return the result with every config's summary at both budgets, best first, and the pairwise
    tests."""
    configs = []
    for config in result["configs"]:
        at = {budget: summary(config["seeds"], result["base"], budget) for budget in BUDGETS}
        configs.append({**config, "summary": at})
    configs = ranked(configs)
    tests = {budget: pairs(configs, budget) for budget in BUDGETS}
    return {**result, "configs": configs, "pairs": tests}


def summary(seeds: Sequence[Result], base: Result, budget: str) -> Result | None:
    """Average the seeds at a budget -> mean, gain over base, intervals, also per task; None if no
    seed got there.

    `beats_base` is None with fewer than two seeds, and False where a run failed: what it would have
    reached is unknown.
    """
    rows = [run["at"][budget] for run in seeds if run["at"][budget] is not None]
    if not rows:
        return None
    # the score, and whether it is better than before training
    score = _over_seeds([row["score"] for row in rows], base["score"])
    failed, low = sum(run["failed"] is not None for run in seeds), score["gain"][1]
    found = {**score, "seeds": len(rows), "failed": failed}
    found["beats_base"] = None if low is None else low > 0 and not failed
    # each task, and what was used up
    found["tasks"] = {}
    for task, value in base["tasks"].items():
        found["tasks"][task] = _over_seeds([row["tasks"][task] for row in rows], value)
    for key in ("iteration", "nfe", "seconds"):
        found[key] = float(np.mean([row[key] for row in rows]))
    return found


def _over_seeds(values: Sequence[float], base: float) -> Result:
    mean, low, high = student(values)
    return {
        "mean": mean,
        "interval": [finite(low), finite(high)],
        "gain": [finite(value - base) for value in (mean, low, high)],
    }


def pairs(configs: Sequence[Result], budget: str) -> Result:
    """Test all pairs of configs at a budget: Student's t over seeds, the variance pooled over all
    configs, by Holm.

    Few seeds say little of a config's own spread; that of all configs together is known far better,
    if they spread alike. `difference` is row minus column; `spread` the pooled std. `detectable` is
    the difference that a pair with the usual seeds would show with a probability of 80 % at the
    strictest of Holm's levels.
    """
    # the scores of every config that got there
    values: dict[str, list[float]] = {}
    for config in configs:
        scores = [run["at"][budget]["score"] for run in config["seeds"] if run["at"][budget]]
        if scores:
            values[config["name"]] = scores
    names, n = list(values), len(values)
    means = [float(np.mean(scores)) for scores in values.values()]
    # a test for each pair
    variance, freedom = pooled([scores for scores in values.values() if len(scores) > 1])
    places = list(itertools.combinations(range(n), 2))
    p = [t_test(values[names[i]], values[names[j]], variance, freedom) for i, j in places]
    adjusted = holm(p)
    tests = sum(not math.isnan(value) for value in p)
    # what these tests could have found
    size = round(float(np.median([len(scores) for scores in values.values()]))) if n else 0
    least = detectable(size, LEVEL / tests, freedom) * math.sqrt(variance) if tests else math.nan
    return {
        "names": names,
        "difference": np.subtract.outer(means, means).tolist(),
        "p": _square(n, places, p),
        "p_holm": _square(n, places, adjusted),
        "tests": tests,
        "significant": sum(value < LEVEL for value in adjusted),
        "spread": finite(math.sqrt(variance)),
        "detectable": finite(least),
    }


def _square(
    n: int, places: Sequence[tuple[int, int]], values: Sequence[float]
) -> list[list[float | None]]:
    """Spread one value per pair over a symmetric matrix [n][n]; None on the diagonal and where it
    is NaN."""
    out: list[list[float | None]] = [[None] * n for _ in range(n)]
    for (i, j), value in zip(places, values, strict=True):
        out[i][j] = out[j][i] = finite(value)
    return out


def finite(value: float) -> float | None:
    """Return None for what JSON cannot hold."""
    return float(value) if math.isfinite(value) else None


def mean_curve(config: Result, base: Result, x: str) -> list[Point]:
    """Average the held-out curves of a config's seeds mark by mark, against `x`; the base model
    comes first."""
    # the rows of each mark; the end of the seconds is one, too
    marks: dict[Any, list[tuple[float, float]]] = {}
    for row in itertools.chain.from_iterable(run["curve"] for run in config["seeds"]):
        ended = [key for key in row["budget"] if key == "seconds"]
        for mark in [*row["marks"], *ended]:
            marks.setdefault(mark, []).append((row[x], row["score"]))
    # their means
    points = []
    for rows in marks.values():
        at, scores = zip(*rows, strict=True)
        points.append(Point(float(np.mean(at)), float(np.mean(scores)), min(scores), max(scores)))
    return [Point(0.0, *[base["score"]] * 3), *sorted(points)]


def labels(names: Sequence[str]) -> dict[str, str]:
    """Shorten names by the part up to a dash that all of them share."""
    heads = [name.split("-")[:-1] for name in names]
    shared = 0
    if len(names) > 1:
        # zip ends with the shortest head
        for parts in zip(*heads, strict=False):
            if len(set(parts)) > 1:
                break
            shared += 1
    return {name: "-".join(name.split("-")[shared:]) for name in names}
