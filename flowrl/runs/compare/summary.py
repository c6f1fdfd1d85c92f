"""The statistics of a comparison, worked out from its result file alone: no file, no model.

One error model gives intervals and tests of pairs alike. Scores vary with the training seed and
with the prompts, see `flowrl/evaluation/crossed_errors.py`. Seeds and what is left are pooled over
all configs where Bartlett's test (1937) finds no difference of their spreads, else each config has
its own. Prompts are shared by all configs, so a gain or a difference is taken per prompt first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from flowrl.core.files import finite_or_none
from flowrl.core.shipped_files import list_configs
from flowrl.evaluation.crossed_errors import (
    Error,
    Groups,
    MeanSquare,
    contrast_error,
    weights_of,
)
from flowrl.evaluation.statistics import prompts_error

BUDGETS = ("nfe", "seconds")
LETTERS = {"nfe": "(a)", "seconds": "(b)"}
LEVEL, POWER = 0.05, 0.8
# below it spreads are not pooled (Bancroft 1964: at .05 too many that differ would be)
POOLED_FROM = 0.25
FEW = 2  # degrees of freedom below which an interval says more of their number than of the score
WIDE = 0.1  # half an interval that tells something, of scores between 0 and 1
MOST_SEEDS = 100  # that are asked for
RESAMPLES = 2000
Result = dict[str, Any]


NONE = Error(*[MeanSquare(0.0, 0)] * 3)


class ErrorModel(NamedTuple):
    """Scores of all configs at a budget, [seeds, scenes], or [seeds, tasks] without outcomes; a
    scene is a prompt, or all prompts that a list's column `scene` puts together."""

    groups: dict[str, np.ndarray]
    base: np.ndarray  # [P]
    tags: list[str]  # [P]
    prompts: bool  # whether the error of prompts is known
    equal_p: float  # of Bartlett's test that all spreads over seeds are equal; NaN: no test

    @property
    def pooled(self) -> bool:
        """Say whether one spread over seeds serves all configs."""
        return not self.equal_p < POOLED_FROM

    def weights(self, task: str | None) -> np.ndarray:
        """Return what each column counts in the score, or in a task's."""
        return weights_of(self.tags, task)

    def score(self, name: str, task: str | None = None) -> tuple[float, Error]:
        """Return a config's mean and its error."""
        return self._error([name], [1.0], np.zeros(len(self.tags)), task)

    def gain(self, name: str, task: str | None = None) -> tuple[float, Error]:
        """Return a config's mean gain over the base model and its error."""
        return self._error([name], [1.0], -self.base, task)

    def difference(self, one: str, other: str) -> tuple[float, Error]:
        """Return the difference of two configs' means and its error."""
        return self._error([one, other], [1.0, -1.0], np.zeros(len(self.tags)), None)

    def _error(
        self, names: list[str], factors: list[float], shift: np.ndarray, task: str | None
    ) -> tuple[float, Error]:
        # the value, and what a seed of each config counts: the others serve the pooled spread alone
        combined, shares = np.zeros(len(self.tags)), dict.fromkeys(self.groups, 0.0)
        for name, factor in zip(names, factors, strict=True):
            group = self.groups[name]
            combined = combined + factor * group.mean(0)
            shares[name] = factor**2 / len(group)
        per_prompt, weights = shift + combined, self.weights(task)
        value = float(per_prompt @ weights)
        # one seed alone says nothing
        if any(len(self.groups[name]) < 2 for name in names):
            return value, NONE
        groups = Groups(list(self.groups.values()), list(shares.values()), self.pooled)
        return value, contrast_error(groups, per_prompt, weights, self.tags)

    def spread(self, name: str | None = None) -> float:
        """Return the std over a config's seeds, or that pooled over all configs; NaN without
        any."""
        weights, groups = self.weights(None), list(self.groups.values())
        if name is not None:
            groups = [self.groups[name]]
        squares, freedom = 0.0, 0
        for group in groups:
            scores = group @ weights
            squares += float(((scores - scores.mean()) ** 2).sum())
            freedom += len(scores) - 1
        if freedom == 0:
            return math.nan
        return math.sqrt(squares / freedom)


def equal_spreads(groups: Sequence[np.ndarray]) -> float:
    """Test that groups of scores [S] have one variance -> p; NaN where no two have two seeds.

    Bartlett's test keeps its level down to two seeds. That of Brown and Forsythe, which asks for no
    normal scores, never rejects with three. Equal scores alone are no smaller spread than others:
    with seeds that agree by chance there is no test.
    """
    several = [group for group in groups if len(group) > 1 and np.ptp(group) > 0]
    if len(several) < 2:
        return math.nan
    return float(stats.bartlett(*several).pvalue)


def at_budget(config: Result, budget: str) -> list[Result]:
    """Return the rows of a config's seeds that reached a budget."""
    return [run["at"][budget] for run in config["seeds"] if run["at"][budget]]


def failed_runs(config: Result) -> int:
    """Count the seeds of a config that failed."""
    return sum(run["failed"] is not None for run in config["seeds"])


def error_model(configs: Sequence[Result], base: Result, budget: str) -> ErrorModel:
    """Gather the scores of all configs that reached a budget."""
    rows: dict[str, list[Result]] = {}
    for config in configs:
        found = at_budget(config, budget)
        if found:
            rows[config["name"]] = found
    # per prompt, where every run and the base model have it, else per task
    every = [base, *itertools.chain.from_iterable(rows.values())]
    prompts = all(row.get("outcomes") for row in every) and "tags" in base
    places: list[tuple[str, str]] = []
    if prompts:
        places = _places(base)
        tags = [tag for tag, _ in dict.fromkeys(places)]
    else:
        tags = list(base["tasks"])

    def values(row: Result) -> list[float]:
        if prompts:
            return _per_scene(row, places)
        return [row["tasks"][task] for task in tags]

    groups = {}
    for name, some in rows.items():
        groups[name] = np.array([values(row) for row in some])
    weights = weights_of(tags)
    equal_p = equal_spreads([group @ weights for group in groups.values()])
    return ErrorModel(groups, np.array(values(base)), tags, prompts, equal_p)


def packed(outcomes: Sequence[Sequence[float]]) -> str:
    """Write scores, one list per prompt, as a short text. Prompts are separated by spaces. Verdicts
    0 and 1 are letters, "0110 1111"; other scores stand between commas, "0.25,0.5 0.75,1"."""
    flat = {value for some in outcomes for value in some}
    short = flat <= {0.0, 1.0}
    words = []
    for some in outcomes:
        # -0.0 equals 0.0 but would be written "-0", two letters; + 0.0 takes its sign away
        if short:
            words.append("".join(f"{value + 0.0:.0f}" for value in some))
        else:
            words.append(",".join(f"{value + 0.0:.6g}" for value in some) + ",")
    return " ".join(words)


def unpacked(text: str) -> list[list[float]]:
    """Read what `packed` wrote."""
    out = []
    for part in text.split(" "):
        scores: Iterable[str] = part
        if "," in part:
            scores = part.strip(",").split(",")
        out.append(list(map(float, scores)))
    return out


def _places(base: Result) -> list[tuple[str, str]]:
    """Return task and scene of every prompt; where scenes are not told, each prompt is its own."""
    tags = base["tags"]
    return list(zip(tags, base.get("scenes") or map(str, range(len(tags))), strict=True))


def _per_scene(row: Result, places: Sequence[tuple[str, str]]) -> list[float]:
    """Average the scores of each scene's images; `places`: task and scene of every prompt."""
    scores: dict[tuple[str, str], list[float]] = {}
    for place, some in zip(places, unpacked(row["outcomes"]), strict=True):
        scores.setdefault(place, []).extend(some)
    return [sum(some) / len(some) for some in scores.values()]


def by_task(model: ErrorModel, name: str) -> np.ndarray:
    """Return a config's score per seed and task, [S, T]."""
    tasks = dict.fromkeys(model.tags)
    return np.stack([model.groups[name] @ model.weights(task) for task in tasks], 1)


def iqm(scores: np.ndarray) -> float:
    """Return the interquartile mean of scores [S, T]: of the middle half of all of them.

    Agarwal et al. 2021 (2108.13264), section 4.3.
    """
    return float(stats.trim_mean(scores, 0.25, axis=None))


def iqm_interval(scores: np.ndarray) -> tuple[float, float]:
    """Return its 95 % bootstrap interval; seeds are drawn anew in each task, as in the paper."""
    seeds, tasks = scores.shape
    if seeds < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(0).integers(0, seeds, (RESAMPLES, seeds, tasks))
    again = np.take_along_axis(scores[None], drawn, 1).reshape(RESAMPLES, -1)
    low, high = np.quantile(stats.trim_mean(again, 0.25, axis=1), (0.025, 0.975))
    return float(low), float(high)


def improvement(one: np.ndarray, other: np.ndarray) -> float:
    """Return the probability of improvement of one [S, T] over another [R, T]: that a seed of the
    one scores more than a seed of the other on a task drawn by chance; ties count half.

    Agarwal et al. 2021, section 4.3: Mann-Whitney's U over S R, the mean over tasks.
    """
    above = one[:, None] > other[None]
    ties = one[:, None] == other[None]
    return float((above + 0.5 * ties).mean())


class CurvePoint(NamedTuple):
    """One place of a mean curve: the same mark of every seed that reached it."""

    x: float
    mean: float
    low: float  # lowest seed
    high: float  # highest seed


def judged_at(result: Result) -> tuple[str, ...]:
    """Return the budgets at which runs were judged: seconds only where they had a limit."""
    if result["budgets"]["seconds"]:
        return BUDGETS
    return BUDGETS[:1]


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values for testing all of them (Holm 1979); a NaN is no test and stays NaN."""
    known = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    out, floor = [math.nan] * len(p), 0.0
    for rank, (value, place) in enumerate(known):
        floor = max(floor, min(1.0, value * (len(known) - rank)))
        out[place] = floor
    return out


def detectable(level: float, freedom: float) -> float:
    """Return the difference, in standard errors, that a two-sided t-test finds with probability
    `POWER`.

    From the noncentral t distribution with the freedom of the error.
    """
    edge = float(stats.t.ppf(1 - level / 2, freedom))

    def missing(d: float) -> float:
        return float(stats.nct.sf(edge, freedom, d)) - POWER

    return float(optimize.brentq(missing, 1e-6, 1e4))


def _best_configs_first(configs: Sequence[Result]) -> list[Result]:
    """Sort configs by their mean at (a), best first; those without a value come last."""

    def key(config: Result) -> tuple[bool, float, str]:
        found = config["summary"]["nfe"]
        if found is None:
            return True, 0.0, config["name"]
        return False, -found["mean"], config["name"]

    return sorted(configs, key=key)


def summarize_result(result: Result) -> Result:
    """Return the result with every config's summary at its budgets, best first, and the pairwise
    tests."""
    configs, models = result["configs"], {}
    for budget in judged_at(result):
        models[budget] = error_model(configs, result["base"], budget)
    summed = []
    for config in configs:
        at = {budget: config_summary(config, model, budget) for budget, model in models.items()}
        summed.append({**config, "summary": at})
    summed = _best_configs_first(summed)
    names, tests = [config["name"] for config in summed], {}
    for budget, model in models.items():
        tests[budget] = _pairwise_tests(names, model)
    return {**result, "configs": summed, "pairs": tests}


def config_summary(config: Result, model: ErrorModel, budget: str) -> Result | None:
    """Average the seeds at a budget -> mean, gain over base, intervals, also per task, and the
    interquartile mean over seeds and tasks; None if no seed got there.

    `beats_base` is None with fewer than two seeds, and False where a run failed: what it would have
    reached is unknown. `p` is of no gain. `collapsed` counts the runs that end below the base
    model, by more than other prompts could explain. `needs_seeds` is the number of seeds from which
    an interval would tell something, None where it does.
    """
    name, rows = config["name"], at_budget(config, budget)
    if not rows:
        return None
    # the score, and whether it is better than before training
    score, failed, beats = _with_error(model, name, None), failed_runs(config), None
    low = score["gain"][1]
    if failed:
        beats = False
    elif low is not None:
        beats = low > 0
    found = {**score, "seeds": len(rows), "failed": failed, "beats_base": beats}
    gain, error = model.gain(name)
    found["p"] = finite_or_none(error.p(gain))
    found["spread"] = finite_or_none(model.spread(name))
    found["collapsed"] = sum(_collapsed(model, row) for row in model.groups[name])
    found["needs_seeds"] = needed_for_interval(model, name)
    # each task, the middle half of all of them, and what was used up
    tasks = dict.fromkeys(model.tags)
    found["tasks"] = {task: _with_error(model, name, task) for task in tasks}
    scores = by_task(model, name)
    span = list(map(finite_or_none, iqm_interval(scores)))
    found["iqm"] = {"mean": iqm(scores), "interval": span}
    for key in ("iteration", "nfe", "seconds"):
        found[key] = float(np.mean([row[key] for row in rows]))
    return found


def _collapsed(model: ErrorModel, run: np.ndarray) -> bool:
    """Say whether a run with these scores [P] ended below the base model: its interval over prompts
    does; where those are not known, its score."""
    gain, weights = run - model.base, model.weights(None)
    most = gain @ weights
    if model.prompts:
        half = float(prompts_error(gain, weights, model.tags).half())
        if math.isfinite(half):
            most += half
    return bool(most < 0)


def needed_for_interval(model: ErrorModel, name: str) -> int | None:
    """Return how many seeds of each config give an interval that tells something; None where the
    seeds that are there do, or none of so many would.

    It tells nothing with less than two degrees of freedom, and where scores between 0 and 1 are
    known to no more than half of their range.
    """
    seeds, error = len(model.groups[name]), model.score(name)[1]
    half = float(error.half())
    shares = all(group.min() >= 0 and group.max() <= 1 for group in model.groups.values())
    if math.isfinite(half) and error.freedom >= FEW and not (shares and half > 0.25):
        return None
    if error._replace(seeds=MeanSquare(0.0, 0)).half() > 0.25:  # it is the prompts that are few
        return None
    # with more seeds the part of the seeds shrinks, and its freedom grows
    if model.pooled:
        several = sum(len(group) > 1 for group in model.groups.values())
        spread, others = model.spread(), max(1, several)
    else:
        spread, others = model.spread(name), 1
    for more in range(max(3, seeds + 1), MOST_SEEDS):
        wide = float(stats.t.isf(LEVEL / 2, others * (more - 1))) * spread / math.sqrt(more)
        if not shares or not math.isfinite(wide) or wide <= WIDE:
            return more
    return None


def seeds_needed(difference: float, configs: int) -> int:
    """Return how many seeds of each config it takes to tell pairs of configs apart that lie
    `difference` spreads over seeds apart, in four of five cases, after Holm's correction over all
    pairs; 0 if `MOST_SEEDS` are too few. The prompts' error comes on top of it."""
    tests = max(1, configs * (configs - 1) // 2)
    for seeds in range(2, MOST_SEEDS):
        if told_apart(configs, seeds, tests) <= difference:
            return seeds
    return 0


def told_apart(configs: int, seeds: int, tests: int | None = None) -> float:
    """Return how many spreads over seeds two of so many configs have to lie apart to be told apart
    in four of five cases: a two-sided test with the spread pooled over all, at the strictest of
    Holm's levels; of one config, how far from the base model."""
    tests = tests or max(1, configs * (configs - 1) // 2)
    sides = 2 if configs > 1 else 1  # both of a pair have seeds, the base model has none
    return detectable(LEVEL / tests, configs * (seeds - 1)) * math.sqrt(sides / seeds)


def _with_error(model: ErrorModel, name: str, task: str | None) -> Result:
    """Set a mean and its gain with their intervals."""
    (mean, error), (gain, gain_error) = model.score(name, task), model.gain(name, task)
    half, gain_half = error.half(), gain_error.half()
    return {
        "mean": mean,
        "interval": [finite_or_none(mean - half), finite_or_none(mean + half)],
        "gain": [
            finite_or_none(gain),
            finite_or_none(gain - gain_half),
            finite_or_none(gain + gain_half),
        ],
    }


def _pairwise_tests(names: Sequence[str], model: ErrorModel) -> Result:
    """Test all pairs of configs at a budget with the comparison's one error model, by Holm.

    `difference` is row minus column; `improvement` the probability that the row's seeds beat the
    column's, over tasks; `spread` the std over seeds, pooled over all configs. `detectable` is the
    difference that a pair of the median error would show with a probability of 80 % at the
    strictest of Holm's levels. `error` says which error model it was, `pooled` whether one spread
    over seeds serves all, by the p-value `equal_spreads` of Bartlett's test.
    """
    # a test for each pair
    names = [name for name in names if name in model.groups]
    n, places = len(names), list(itertools.combinations(range(len(names)), 2))
    p, known = [], []
    for i, j in places:
        value, error = model.difference(names[i], names[j])
        p.append(error.p(value))
        if not math.isnan(p[-1]):
            known.append(error)
    adjusted = holm(p)
    # what these tests could have found
    least = math.nan
    if known:
        middle = sorted(known, key=attrgetter("variance"))[len(known) // 2]
        least = detectable(LEVEL / len(known), middle.freedom) * math.sqrt(middle.variance)
    # how probably each config beats each
    means = [model.score(name)[0] for name in names]
    tasks = [by_task(model, name) for name in names]
    better = []
    for one in tasks:
        better.append([improvement(one, other) for other in tasks])
    kind = "seeds"
    if model.prompts:
        kind = "seeds and prompts"
    return {
        "error": kind,
        "names": names,
        "difference": np.subtract.outer(means, means).tolist(),
        "improvement": better,
        "p": _square(n, places, p),
        "p_holm": _square(n, places, adjusted),
        "tests": len(known),
        "significant": sum(value < LEVEL for value in adjusted),
        "spread": finite_or_none(model.spread()),
        "pooled": model.pooled,
        "equal_spreads": finite_or_none(model.equal_p),
        "detectable": finite_or_none(least),
    }


def _square(
    n: int, places: Sequence[tuple[int, int]], values: Sequence[float]
) -> list[list[float | None]]:
    """Spread one value per pair over a symmetric matrix [n][n]; None on the diagonal and where it
    is NaN."""
    out: list[list[float | None]] = [[None] * n for _ in range(n)]
    for (i, j), value in zip(places, values, strict=True):
        out[i][j] = out[j][i] = finite_or_none(value)
    return out


def mean_curve(config: Result, base: Result, x: str) -> list[CurvePoint]:
    """Average the held-out curves of a config's seeds mark by mark, against `x`; the base model
    comes first."""
    # the rows of each mark; the end of the seconds is one, too
    marks: dict[Any, list[tuple[float, float]]] = {}
    for row in itertools.chain.from_iterable(run["curve"] for run in config["seeds"]):
        ends = list(row["marks"])
        if "seconds" in row["budget"]:
            ends.append("seconds")
        for mark in ends:
            marks.setdefault(mark, []).append((row[x], row["score"]))
    # their means
    points = []
    for rows in marks.values():
        at, scores = zip(*rows, strict=True)
        points.append(
            CurvePoint(float(np.mean(at)), float(np.mean(scores)), min(scores), max(scores))
        )
    return [CurvePoint(0.0, *[base["score"]] * 3), *sorted(points)]


def labels(names: Sequence[str]) -> dict[str, str]:
    """Shorten names by the folder of shipped configs that all of them begin with: what else they
    share is part of a method's name."""
    heads = {name.partition("-")[0] for name in names}
    folders = {name.partition("/")[0] for name in list_configs() if "/" in name}
    if len(names) < 2 or len(heads) > 1 or not heads <= folders:
        return {name: name for name in names}
    return {name: name.partition("-")[2] or name for name in names}
