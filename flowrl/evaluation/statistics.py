"""Means with intervals over prompts, paired comparisons, and the strength of what people voted on
(Bradley-Terry). Intervals are those of `flowrl/evaluation/crossed_errors.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import binomtest, hmean, norm

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.files import finite_or_none
from flowrl.core.prompts import task_of
from flowrl.evaluation.crossed_errors import (
    Error,
    MeanSquare,
    crossed,
    interval_around,
    prompt_part,
    verdicts,
    weights_of,
)

if TYPE_CHECKING:
    from torch import Tensor

Z95 = float(norm.ppf(0.975))  # the normal quantile of a two-sided 95 % interval

Result = tuple[str, str, float]  # two names, and 1 where the first won, 0 the second, 0.5 a tie


def summarize_scores(
    values: Tensor, tags: list[str], rows: Sequence[int] | None = None
) -> dict[str, Any]:
    """Average scores [n] per tag, then over tags -> {"mean", "interval", "images", "tasks": {tag:
    {...}}}.

    `rows` [n] says of which prompt each image is; None: each of its own. Intervals hold 95 % over
    prompts, see `crossed`: what other prompts of these tasks would give. Those of right and wrong
    images end at 0 and 1. [None, None] where no task has two prompts.
    """
    # one value for each prompt
    if rows is None:
        rows = range(len(tags))
    of_prompt: dict[int, list[int]] = {}
    for image, place in enumerate(rows):
        of_prompt.setdefault(place, []).append(image)
    scores = values.double().numpy()
    means = np.array([scores[images].mean() for images in of_prompt.values()])
    found = crossed(means[None], [tags[images[0]] for images in of_prompt.values()])
    # tasks, and the mean over them; what cannot lie below 0 or above 1 ends there
    ends = (0.0, 1.0) if verdicts(scores) else (-math.inf, math.inf)
    tasks: dict[str, Any] = {}
    for tag, task in found["tasks"].items():
        mine = values[[own == tag for own in tags]].double()
        interval = _within(task["interval"], ends)
        tasks[tag] = {"mean": mine.mean().item(), "interval": interval, "images": len(mine)}
    return {
        "mean": sum(task["mean"] for task in tasks.values()) / len(tasks),
        "interval": _within(found["interval"], ends),
        "images": len(tags),
        "tasks": tasks,
    }


def _within(interval: Sequence[float | None], ends: tuple[float, float]) -> list[float | None]:
    """Cut an interval off at both ends."""
    return [bound if bound is None else min(max(bound, ends[0]), ends[1]) for bound in interval]


def summarize_apart(
    values: Tensor, tags: list[str], held: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """Summarize scores [n] of prompts without and with a mark `held` [n] -> {"seen", "held_out"}:
    two summaries that can be compared, since both are over the tasks that have prompts of either
    kind; {} if no task has both. `rows` [n] as in `summarize_scores`."""
    marks = held.tolist()
    of_mark = defaultdict(set)
    for tag, mark in zip(tags, marks, strict=True):
        of_mark[mark].add(tag)
    common = of_mark[False] & of_mark[True]
    if not common:
        return {}
    out = {}
    for name, wanted in (("seen", False), ("held_out", True)):
        places = [i for i, mark in enumerate(marks) if mark == wanted and tags[i] in common]
        own = [tags[i] for i in places]
        prompts = [rows[i] for i in places]
        out[name] = summarize_scores(values[places], own, prompts)
    return out


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of `hits` successes in `n` trials (Wilson 1927)."""
    if not 0 <= hits <= n or n < 1:
        raise ConfigError(f"wilson: needs 0 <= hits <= n and n >= 1, got hits={hits}, n={n}")
    found = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def by_prompt(scores: Tensor, rows: list[int], prompts: int) -> list[list[float]]:
    """Sort the scores of images [n] by the prompt [n] of each."""
    each: list[list[float]] = [[] for _ in range(prompts)]
    for row, value in zip(rows, scores.tolist(), strict=True):
        each[row].append(value)
    return each


def known_mean(scores: Tensor) -> float | None:
    """Average scores [n] without those that are NaN; None where that is no finite number, which
    JSON lacks."""
    return finite_or_none(scores.nanmean().item())


def prompt_means(
    each: list[list[float]], records: Sequence[Mapping[str, Any]]
) -> dict[str, list[float | None]]:
    """Average the scores of each prompt, without those that are NaN -> {tag: [mean]}."""
    out: dict[str, list[float | None]] = {}
    for values, record in zip(each, records, strict=True):
        known = [value for value in values if not math.isnan(value)]
        mean = round(sum(known) / len(known), 6) if known else None
        out.setdefault(task_of(record), []).append(mean)
    return out


def paired_difference(first: np.ndarray, second: np.ndarray, tags: Sequence[str]) -> dict[str, Any]:
    """Compare scores [P, S] of P prompts and S images each, `first` minus `second` ->
    {"difference", "interval", "p", "tasks"}.

    The difference is the mean over tasks of the means over a task's prompts, each with the mean
    difference of its images: what makes a prompt easy for both drops out. The 95 % interval and the
    two-sided p-value of no difference are over prompts, see `crossed_errors`; [None, None] and None
    where no task has two prompts. They say nothing of other training seeds. NaN = not scored: such
    an image counts in neither model's mean. Raises DataError for shapes that differ and a prompt
    without any pair.
    """
    # one difference per prompt
    if first.shape != second.shape or first.ndim != 2 or len(tags) != len(first):
        raise DataError(
            f"expected scores [P, S] of the same images and a task for each prompt, got shapes "
            f"{[*first.shape]}, {[*second.shape]} and {len(tags)} tasks"
        )
    gaps = first.astype(float) - second.astype(float)
    counted = np.isfinite(gaps)
    if not counted.any(1).all():
        raise DataError(f"prompt {int((~counted.any(1)).argmax())} has no image that both scored")
    values = np.nansum(gaps, 1) / counted.sum(1)
    whole = float(verdicts(first) and verdicts(second))
    # each task by itself, then the mean over tasks
    tasks = {}
    for name in dict.fromkeys(tags):
        weights = weights_of(tags, name)
        one = _difference(values, weights, tags, whole)
        tasks[name] = {**one, "prompts": int(np.count_nonzero(weights))}
    return {**_difference(values, weights_of(tags), tags, whole), "tasks": tasks}


def prompts_error(
    values: np.ndarray, weights: np.ndarray, tags: Sequence[str], whole: float = 0.0
) -> Error:
    """Return the error over prompts alone of one value per prompt [..., P]; arguments as those of
    `prompt_part`."""
    nothing = MeanSquare(0.0, 0)
    return Error(nothing, prompt_part(values, weights, tags, whole), nothing)


def _difference(
    values: np.ndarray, weights: np.ndarray, tags: Sequence[str], whole: float
) -> dict[str, Any]:
    """Return a difference with its interval, which has no width where all prompts have the same
    one that is none of verdicts."""
    error, difference = prompts_error(values, weights, tags, whole), float(values @ weights)
    half, p = float(error.half()), error.p(difference)
    if error.prompts.freedom > 0 and not error.variance > 0:
        half, p = 0.0, float(difference == 0)
    interval = interval_around(difference, half)
    return {"difference": difference, "interval": interval, "p": finite_or_none(p)}


def jackknifed(
    measure: Callable[[list[Any]], dict[str, float]],
    prompts: Sequence[Sequence[Any]],
    whole: float = 0.0,
) -> dict[str, tuple[float, float] | None]:
    """Return the 95 % interval of each number that `measure` makes of a list of images' rows.

    `prompts` are the rows of each prompt's images; prompts are left out one by one with all of
    their images (Efron and Stein 1981), and the pseudo-values have the interval of `prompt_part`,
    `whole` as there. None for a number that one prompt alone decides.
    """
    # every number of all prompts, and of all but one
    n, every = len(prompts), [*chain.from_iterable(prompts)]
    numbers, left = measure(every), dict[str, list[float]]()
    if n < 2:
        return dict.fromkeys(numbers)
    start = 0
    for rows in prompts:
        others = every[:start] + every[start + len(rows) :]
        start += len(rows)
        for name, value in measure(others).items():
            left.setdefault(name, []).append(value)
    # what each prompt says of it
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, value in numbers.items():
        if len(left.get(name, [])) < n:
            intervals[name] = None
            continue
        pseudo = n * value - (n - 1) * np.array(left[name])
        half = float(prompts_error(pseudo, np.full(n, 1 / n), ["all"] * n, whole).half())
        if not math.isfinite(half):
            half = 0.0
        intervals[name] = (value - half, value + half)
    return intervals


def decided_by(images: int) -> str:
    """Say which change of a share of right images so many test images decide.

    Half of the 95 % interval of a difference of two shares at one half, which is where a share
    varies most, with images of each model that vary on their own: ``1.96 sqrt(1 / 2 n)``. Pairs
    from one noise vary together, so less may be decided, too; prompts of which each is right always
    or never decide less.
    """
    points = 100 * float(norm.ppf(0.975)) * math.sqrt(0.5 / images)
    return (
        f"{images:,} images decide a change of right images above about {points:.2g} points; half "
        f"of that takes {4 * images:,}"
    )


def mmhm(
    values: Mapping[str, Sequence[float]], *, lower: Collection[str] = ("fid",)
) -> list[float]:
    """Return the min-max harmonic mean of each setting from {measure: one value per setting}:
    several measures as one number, which none of them can hide in.

    u = (x - min) / (max - min), turned round for measures of `lower`, 1 where all are equal; then
    K / sum_k 1 / (eps + u_k), up to 1 + eps, with eps = 0.001. A measure at its worst keeps the
    score below about K eps, so of few settings almost all score nothing: compare at least five.
    Raises DataError for columns that differ in length, and numbers that are not finite.
    """
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"mmhm: expected measures with one value for each setting, got {lengths}")
    for name, column in values.items():
        for place, value in enumerate(column):
            if not math.isfinite(value):  # nothing is larger or smaller
                raise DataError(
                    f"mmhm: {name}, setting {place + 1} of {len(column)}: expected a finite "
                    f"number, got {value}; leave this measure out, or measure again what has none"
                )
    table = np.array([[*column] for column in values.values()], float)  # [measures, settings]
    for name, column in zip(values, table, strict=True):
        if name in lower:
            column *= -1
    low, high = table.min(1, keepdims=True), table.max(1, keepdims=True)
    shares = (table - low) / np.where(high > low, high - low, 1.0)
    shares[(high == low)[:, 0]] = 1.0
    return [float(mean) for mean in hmean(shares + 1e-3)]


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
    # 95 %
    for name, s, e, n in zip(names, score.tolist(), error.tolist(), count.tolist(), strict=True):
        found.append(Strength(name, s, s - Z95 * e, s + Z95 * e, n))
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
