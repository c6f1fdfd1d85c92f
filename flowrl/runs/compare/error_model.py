"""The one error model of a comparison: intervals and tests of pairs come from it alike.

Scores vary with the training seed and with the prompts, see `flowrl/evaluation/crossed_errors.py`.
Seeds and what is left are pooled over all configs; prompts are shared by all configs, so a gain
or a difference is taken per prompt first. Where the file has no outcomes per image, only the seeds
are known: then everything is Student's with the variance over seeds pooled over all configs, and
says nothing of other prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from flowrl.evaluation.crossed_errors import Error, contrast_error, weights_of
from flowrl.runs.compare.outcomes import unpacked

Result = dict[str, Any]
NONE = Error(math.nan, 0)
RESAMPLES = 2000


class ErrorModel(NamedTuple):
    """Scores of all configs at a budget, [seeds, prompts], or [seeds, tasks] without outcomes."""

    groups: dict[str, np.ndarray]
    base: np.ndarray  # [P]
    tags: list[str]  # [P]
    prompts: bool  # whether the error of prompts is known

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
        mine = [self.groups[name] for name in names]
        per_prompt = shift + sum(f * g.mean(0) for f, g in zip(factors, mine, strict=True))
        weights, share = self.weights(task), sum(1 / len(group) for group in mine)
        value = float(per_prompt @ weights)
        # one seed alone says nothing
        if min(len(group) for group in mine) < 2:
            return value, NONE
        groups = list(self.groups.values())
        return value, contrast_error(groups, per_prompt, weights, self.tags, share)

    def spread(self) -> float:
        """Return the std over seeds, pooled over all configs; NaN without any."""
        weights, squares, freedom = self.weights(None), 0.0, 0
        for group in self.groups.values():
            scores = group @ weights
            squares += float(((scores - scores.mean()) ** 2).sum())
            freedom += len(scores) - 1
        return math.sqrt(squares / freedom) if freedom else math.nan


def error_model(configs: Sequence[Result], base: Result, budget: str) -> ErrorModel:
    """Gather the scores of all configs that reached a budget."""
    rows: dict[str, list[Result]] = {}
    for config in configs:
        found = [run["at"][budget] for run in config["seeds"] if run["at"][budget]]
        if found:
            rows[config["name"]] = found
    # per prompt, where every run and the base model have it
    every = [base, *(row for some in rows.values() for row in some)]
    prompts = all(row.get("outcomes") for row in every) and "tags" in base
    tags = base["tags"] if prompts else list(base["tasks"])
    values = _per_prompt if prompts else _per_task
    groups = {}
    for name, some in rows.items():
        groups[name] = np.array([values(row, tags) for row in some])
    return ErrorModel(groups, np.array(values(base, tags)), list(tags), prompts)


def _per_prompt(row: Result, _: Sequence[str]) -> list[float]:
    return [sum(some) / len(some) for some in unpacked(row["outcomes"])]


def _per_task(row: Result, tasks: Sequence[str]) -> list[float]:
    return [row["tasks"][task] for task in tasks]


def by_task(model: ErrorModel, name: str) -> np.ndarray:
    """Return a config's score per seed and task, [S, T]."""
    tasks = dict.fromkeys(model.tags)
    return np.stack([model.groups[name] @ model.weights(task) for task in tasks], 1)


def iqm(scores: np.ndarray) -> float:
    """Return the interquartile mean of scores [S, T]: of the middle half of all of them.

    Agarwal et al. 2021 (2108.13264), section 4.3.
    """
    return float(stats.trim_mean(scores, 0.25, axis=None))


def iqm_interval(scores: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return its 95 % bootstrap interval; seeds are drawn anew in each task, as in the paper."""
    seeds, tasks = scores.shape
    if seeds < 2:
        return math.nan, math.nan
    drawn = np.random.default_rng(seed).integers(0, seeds, (RESAMPLES, seeds, tasks))
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
