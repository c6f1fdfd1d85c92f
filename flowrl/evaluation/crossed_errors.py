"""One error model for scores that vary with the training seed and with the prompts.

A score is the mean over tasks of means over a task's prompts. Its error has three parts, taken to
be random and independent: the seed (shared by all prompts), the prompt (shared by all seeds), and
what is left, such as one image's luck. Seeds and prompts are crossed, since every seed is judged
on the same prompts, so the variance of the mean is

    Var = MS(seed) + MS(prompt) - MS(rest),

each divided by what it is averaged over: the usual estimate of a two-way random model, at least the
larger of the first two, here with the prompts stratified by task. Its degrees of freedom follow
Satterthwaite (1946). The interval is Student's with these.

A contrast of two trained models on the same prompts is the same with the difference per prompt, so
what makes a prompt easy for both drops out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


class MeanSquare(NamedTuple):
    """A mean square, divided by what it is averaged over, and its degrees of freedom."""

    variance: float
    freedom: float


class Error(NamedTuple):
    """The error of a mean or of a difference."""

    variance: float
    freedom: float

    def half(self, level: float = 0.05) -> float:
        """Return half of the interval; NaN where nothing is known of the error."""
        if not (self.variance > 0 and self.freedom > 0):
            return math.nan
        return float(stats.t.ppf(1 - level / 2, self.freedom) * math.sqrt(self.variance))

    def p(self, difference: float) -> float:
        """Return the two-sided p-value of no difference; NaN where nothing is known."""
        if not (self.variance > 0 and self.freedom > 0):
            return math.nan
        return float(2 * stats.t.sf(abs(difference) / math.sqrt(self.variance), self.freedom))


def weights_of(tags: Sequence[str], only: str | None = None) -> np.ndarray:
    """Return what a prompt counts in the mean over tasks, or in one task's -> [P], sum 1."""
    named = np.array(tags)
    tasks = [only] if only is not None else list(dict.fromkeys(tags))
    out = np.zeros(len(tags))
    for task in tasks:
        mine = named == task
        out[mine] = 1 / mine.sum() / len(tasks)
    return out


def seed_part(groups: Sequence[np.ndarray], weights: np.ndarray, share: float) -> MeanSquare:
    """Return the part of the seeds, their variance pooled over groups of values [S, P].

    `share` is what the variance counts: 1 / S for a mean of S seeds, the sum of both for a
    difference, the sum of a^2 / S for a sum of group means with factors a.
    """
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(((g @ weights - (g @ weights).mean()) ** 2).sum()) for g in groups)
    return MeanSquare(squares / freedom * share if freedom else 0.0, freedom)


def prompt_part(values: np.ndarray, weights: np.ndarray, tags: Sequence[str]) -> MeanSquare:
    """Return the part of the prompts from one value per prompt [P], stratified by task."""
    named, variance, freedom = np.array(tags), 0.0, 0
    for task in dict.fromkeys(tags):
        mine = named == task
        n = int(mine.sum())
        if n > 1 and weights[mine].any():
            variance += float(weights[mine][0] ** 2 * n * values[mine].var(ddof=1))
            freedom += n - 1
    return MeanSquare(variance, freedom)


def rest_part(
    groups: Sequence[np.ndarray], weights: np.ndarray, tags: Sequence[str], share: float
) -> MeanSquare:
    """Return the part of what neither seed nor prompt explains, pooled over groups [S, P]; `share`
    as for the seeds."""
    named, variance, freedom = np.array(tags), 0.0, 0
    for task in dict.fromkeys(tags):
        mine = named == task
        n = int(mine.sum())
        free = sum((len(group) - 1) * (n - 1) for group in groups)
        if not (free and weights[mine].any()):
            continue
        # what is left within a task without the means of seeds and of prompts
        squares = 0.0
        for group in groups:
            some = group[:, mine]
            left = some - some.mean(0) - some.mean(1, keepdims=True) + some.mean()
            squares += float((left**2).sum())
        variance += float(weights[mine][0] ** 2 * n * squares / free) * share
        freedom += free
    return MeanSquare(variance, freedom)


def combined(seed: MeanSquare, prompt: MeanSquare, rest: MeanSquare) -> Error:
    """Put the parts together: their variances with signs, Satterthwaite's freedom."""
    variance = seed.variance + prompt.variance - rest.variance
    floor = max(seed, prompt)
    if variance <= floor.variance:
        return Error(*floor)
    spread = 0.0
    for part in (seed, prompt, rest):
        spread += part.variance**2 / part.freedom if part.freedom else 0.0
    return Error(variance, variance**2 / spread if spread else 0.0)


def contrast_error(
    groups: Sequence[np.ndarray],
    contrast: np.ndarray,
    weights: np.ndarray,
    tags: Sequence[str],
    share: float,
) -> Error:
    """Return the error of a contrast of group means that has the value [P] for each prompt.

    Seeds and the rest are pooled over the groups [S, P]; `share` as in `seed_part`.
    """
    seed = seed_part(groups, weights, share)
    rest = rest_part(groups, weights, tags, share)
    return combined(seed, prompt_part(contrast, weights, tags), rest)


def crossed(values: np.ndarray, tags: Sequence[str]) -> dict[str, Any]:
    """Average values [S, P] of S seeds and P prompts over tasks -> {"mean", "interval", "tasks"}.

    With one seed the interval says nothing of other seeds.
    """

    def one(weights: np.ndarray) -> dict[str, Any]:
        error = contrast_error([values], values.mean(0), weights, tags, 1 / len(values))
        mean, half = float(values.mean(0) @ weights), error.half()
        bounds = [mean - half, mean + half] if math.isfinite(half) else [None, None]
        return {"mean": mean, "interval": bounds}

    tasks: Mapping[str, Any] = {task: one(weights_of(tags, task)) for task in dict.fromkeys(tags)}
    return {**one(weights_of(tags)), "tasks": tasks}
