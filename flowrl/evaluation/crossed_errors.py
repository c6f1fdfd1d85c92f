"""One error model for scores that vary with the training seed and with the prompts.

A score is the mean over tasks of means over a task's prompts. Its error has three parts, taken to
be random and independent: the seed (shared by all prompts), the prompt (shared by all seeds), and
what is left, such as one image's luck. Seeds and prompts are crossed, since every seed is judged
on the same prompts, so the variance of the mean is

    Var = MS(seed) + MS(prompt) - MS(rest),

each divided by what it is averaged over: the usual estimate of a two-way random model, at least the
larger of the first two, here with the prompts stratified by task. A contrast of two trained models
on the same prompts is the same with the difference per prompt, so what makes a prompt easy for both
drops out.

The interval is Student's, made so that it holds the truth in at least 93 of 100 cases where 95 are
promised, also with few prompts, rare verdicts, skewed scores and two noisy seeds; with normal
scores it holds more. `scripts/bench/coverage.py` measures it, assets/results/coverage.json has the
table.

- The parts of seeds and prompts keep their own Student's factor, and squares of half widths are
  added (Banerjee 1960, Sankhya 22, 357): at least 95 % for normal parts, where one factor with the
  degrees of freedom of Satterthwaite (1946) holds 88 % with two noisy seeds.
- The freedom of the prompts is Satterthwaite's over the tasks, whose variances differ.
- Two prompts more are counted in each task, as far off as all are (the two successes and failures
  of Agresti and Coull 1998). Verdicts that never differ within a task are as far off as verdicts
  can be: nothing seen in n prompts leaves about 3 / n.
- Student's factor t is lengthened by ``skew (2 t^2 + 1) / 6``, the first term of Johnson (1978) and
  Hall (1992) for the longer side, on both sides.

All functions take values with further axes in front, one entry each for many sets at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from flowrl.core.errors import DataError

MORE = 2  # prompts that are counted beside those that were seen, in each task
LEAST_P = 1e-60  # below it a p-value is 0
Value = Any  # a number, or an array [...] of one for each set


class MeanSquare(NamedTuple):
    """A mean square, divided by what it is averaged over, its degrees of freedom, and for prompts
    the skewness of the mean."""

    variance: Value
    freedom: Value
    skew: Value = 0.0


class Error(NamedTuple):
    """The error of a mean or of a difference: its parts, see the head of this file."""

    seeds: MeanSquare
    prompts: MeanSquare
    rest: MeanSquare

    @property
    def variance(self) -> Value:
        """Return the variance of the mean."""
        seeds, prompts = self.seeds.variance, self.prompts.variance
        both = seeds + np.maximum(prompts - self.rest.variance, 0.0)
        return np.maximum(both, prompts)

    @property
    def freedom(self) -> float:
        """Return the degrees of freedom of the one Student's factor that gives the same interval;
        0 where nothing is known."""
        half = float(self.half())
        if not math.isfinite(half):
            return 0.0
        ratio = half / math.sqrt(self.variance)

        def longer(log: float) -> float:
            return float(stats.t.isf(0.025, math.exp(log))) - ratio

        low, high = math.log(0.5), math.log(1e6)
        if longer(low) <= 0:
            return math.exp(low)
        if longer(high) >= 0:
            return math.exp(high)
        return math.exp(optimize.brentq(longer, low, high))

    def half(self, level: float = 0.05) -> Value:
        """Return half of the interval; NaN where nothing is known of the error."""
        of_seeds = _factor(level, self.seeds) ** 2 * self.seeds.variance
        squared = _factor(level, self.prompts) ** 2
        alone = np.maximum(self.prompts.variance - self.rest.variance, 0.0)
        found = np.maximum(of_seeds + squared * alone, squared * self.prompts.variance)
        return np.where(found > 0, np.sqrt(found), np.nan)[()]

    def p(self, difference: float) -> float:
        """Return the two-sided p-value of no difference: the level whose interval ends at 0; NaN
        where nothing is known."""
        if not math.isfinite(self.half()):
            return math.nan

        def wider(log: float) -> float:
            half = float(self.half(math.exp(log)))
            if not math.isfinite(half):
                half = 0.0
            return half - abs(difference)

        least = math.log(LEAST_P)
        if wider(0.0) >= 0:
            return 1.0
        if not wider(least) > 0:
            return 0.0
        return math.exp(optimize.brentq(wider, least, 0.0))


def _factor(level: float, part: MeanSquare) -> Value:
    """Return Student's factor of a part, lengthened for its skewness; 0 for one that is unknown."""
    known = np.greater(part.freedom, 0)
    t = stats.t.isf(level / 2, np.where(known, part.freedom, 1.0))
    return np.where(known, t + part.skew * (2 * t**2 + 1) / 6, 0.0)[()]


def weights_of(tags: Sequence[str], only: str | None = None) -> np.ndarray:
    """Return what a prompt counts in the mean over tasks, or in one task's -> [P], sum 1."""
    named = np.array(tags)
    tasks = [only] if only is not None else list(dict.fromkeys(tags))
    out = np.zeros(len(tags))
    for task in tasks:
        mine = named == task
        out[mine] = 1 / mine.sum() / len(tasks)
    return out


class Groups(NamedTuple):
    """The seeds of one or several trained models on the same prompts."""

    values: Sequence[np.ndarray]  # [..., S, P] each
    shares: Sequence[float]  # what the variance of one seed counts: factor^2 / S; 0 = only pooled
    equal: bool = True  # one variance for all; else each has its own (Welch 1947)


def seed_part(groups: Groups, weights: np.ndarray) -> MeanSquare:
    """Return the part of the seeds, from the spread of the seeds' scores."""
    each = []
    for values in groups.values:
        seeds = values.shape[-2]
        each.append((np.var(values @ weights, axis=-1, ddof=min(1, seeds - 1)), seeds - 1))
    return _over_groups(each, groups)


def _over_groups(each: Sequence[tuple[Value, int]], groups: Groups) -> MeanSquare:
    """Put the variances of groups together, each with its freedom."""
    freedom = sum(free for _, free in each)
    if groups.equal:
        squares = sum(variance * free for variance, free in each)
        return MeanSquare(squares / max(freedom, 1) * sum(groups.shares), freedom)
    parts = []
    for (variance, free), share in zip(each, groups.shares, strict=True):
        if share:
            parts.append(MeanSquare(variance * share, free))
    return summed(parts)


def summed(parts: Sequence[MeanSquare]) -> MeanSquare:
    """Add mean squares -> their sum, with Satterthwaite's freedom, at most that of all."""
    variance: Value = sum(part.variance for part in parts)
    most = sum(part.freedom for part in parts)
    spread: Value = sum(part.variance**2 / np.maximum(part.freedom, 1e-9) for part in parts)
    known = np.greater(spread, 0)
    found = np.where(known, variance**2 / np.where(known, spread, 1.0), most)
    return MeanSquare(variance, np.minimum(found, most)[()])


def prompt_part(
    values: np.ndarray, weights: np.ndarray, tags: Sequence[str], whole: float = 0.0
) -> MeanSquare:
    """Return the part of the prompts from one value per prompt [..., P], stratified by task.

    A task of one prompt has the variance of the others, pooled. `whole` is how far apart values can
    be where that is known, as 1 of verdicts: what is counted where no two of a task differ.
    """
    # the second and third moment within each task, and over all of them
    tasks = [_moments(values, tags, task) for task in dict.fromkeys(tags)]
    pooled, third = _pooled_moments(tasks)
    # the variance of the mean: of each task its own, or that with two prompts more if it is larger
    own, larger, cubes = [], [], 0.0
    for places, second, cube in tasks:
        weight = weights[places[0]]
        if weight:
            share = MORE / (second.freedom + MORE)
            more = (1 - share) * second.variance + share * pooled.variance
            scale, known = weight**2 * len(places), second
            if not second.freedom:
                known = pooled
            own.append(MeanSquare(scale * known.variance, known.freedom))
            larger.append(MeanSquare(scale * np.maximum(second.variance, more), known.freedom))
            cubes = cubes + weight * scale * np.abs((1 - share) * cube + share * third)
    variance: Value = sum(part.variance for part in larger)
    freedom = np.minimum(summed(own).freedom, summed([*map(_upper, larger)]).freedom)
    # where nothing differs, verdicts could; and the skewness of the mean
    n, varies = int(np.count_nonzero(weights)), np.greater(variance, 0)
    least = np.where(varies, variance, whole**2 * float((weights**2).sum()))
    skew = np.where(varies, cubes / np.where(varies, variance, 1.0) ** 1.5, 0.0)
    return MeanSquare(variance + MORE / n * least, np.minimum(freedom, pooled.freedom), skew[()])


def _upper(part: MeanSquare) -> MeanSquare:
    """Return a mean square that the true one exceeds in half of the cases: few degrees of freedom
    shall not seem more where the variance came out small by chance."""
    if not part.freedom:
        return part
    return part._replace(variance=part.variance * part.freedom / stats.chi2.ppf(0.5, part.freedom))


def _moments(
    values: np.ndarray, tags: Sequence[str], task: str
) -> tuple[list[int], MeanSquare, Value]:
    """Return a task's places, and its variance and third moment about the mean, without bias; 0 of
    fewer prompts than 2, and 3, which say nothing of them."""
    places = [place for place, tag in enumerate(tags) if tag == task]
    mine, n = values[..., places], len(places)
    left = mine - mine.mean(-1, keepdims=True)
    second = MeanSquare((left**2).sum(-1) / max(n - 1, 1), n - 1)
    third: Value = 0.0
    if n > 2:
        third = (left**3).mean(-1) * n**2 / ((n - 1) * (n - 2))
    return places, second, third


def _pooled_moments(
    tasks: Sequence[tuple[list[int], MeanSquare, Value]],
) -> tuple[MeanSquare, Value]:
    """Pool the variances and third moments of tasks, by their degrees of freedom."""
    freedom = sum(second.freedom for _, second, _ in tasks)
    squares = sum(second.variance * second.freedom for _, second, _ in tasks)
    several = sum(max(second.freedom - 1, 0) for _, second, _ in tasks)
    cubes = sum(cube * max(second.freedom - 1, 0) for _, second, cube in tasks)
    return MeanSquare(squares / max(freedom, 1), freedom), cubes / max(several, 1)


def rest_part(groups: Groups, weights: np.ndarray, tags: Sequence[str]) -> MeanSquare:
    """Return the part of what neither seed nor prompt explains."""
    named, parts = np.array(tags), []
    for task in dict.fromkeys(tags):
        mine = named == task
        n, weight = int(mine.sum()), weights[mine]
        # what is left within a task without the means of seeds and of prompts
        each = []
        for values in groups.values:
            some, free = values[..., mine], (values.shape[-2] - 1) * (n - 1)
            left = some - some.mean(-2, keepdims=True) - some.mean(-1, keepdims=True)
            left = left + some.mean((-1, -2), keepdims=True)
            each.append(((left**2).sum((-1, -2)) / max(free, 1), free))
        part = _over_groups(each, groups)
        if weight.any() and np.any(np.greater(part.freedom, 0)):
            parts.append(MeanSquare(weight[0] ** 2 * n * part.variance, part.freedom))
    return summed(parts) if parts else MeanSquare(0.0, 0)


def contrast_error(
    groups: Groups, contrast: np.ndarray, weights: np.ndarray, tags: Sequence[str]
) -> Error:
    """Return the error of a contrast of group means that has the value [..., P] for each prompt."""
    whole = float(all(verdicts(values) for values in groups.values))
    return Error(
        seed_part(groups, weights),
        prompt_part(contrast, weights, tags, whole),
        rest_part(groups, weights, tags),
    )


def verdicts(values: np.ndarray) -> bool:
    """Say whether all of values [...] are 0 or 1; NaN = not scored counts for neither."""
    return bool((np.isin(values, (0, 1)) | np.isnan(values)).all())


def crossed(values: np.ndarray, tags: Sequence[str]) -> dict[str, Any]:
    """Average values [S, P] of S seeds and P prompts over tasks -> {"mean", "interval", "tasks"}.

    With one seed the interval says nothing of other seeds. Raises DataError for values that are
    none of these prompts.
    """
    if values.ndim != 2 or values.shape[1] != len(tags) or not len(values):
        raise DataError(
            f"expected values [S, P] of at least one seed and {len(tags)} prompts, got shape "
            f"{[*values.shape]}"
        )
    groups = Groups([values], [1 / len(values)])

    def one(weights: np.ndarray) -> dict[str, Any]:
        error = contrast_error(groups, values.mean(0), weights, tags)
        mean, half = float(values.mean(0) @ weights), float(error.half())
        return {"mean": mean, "interval": interval_around(mean, half)}

    tasks = {task: one(weights_of(tags, task)) for task in dict.fromkeys(tags)}
    return {**one(weights_of(tags)), "tasks": tasks}


def interval_around(mean: float, half: float) -> list[float | None]:
    """Return both ends of an interval; [None, None] where its half is not known."""
    if not math.isfinite(half):
        return [None, None]
    return [mean - half, mean + half]
