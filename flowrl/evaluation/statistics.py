"""Means with intervals over images and tasks, comparisons by a paired bootstrap, and the strength
of what people voted on (Bradley-Terry)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import binomtest, norm, t
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError

Z95 = float(norm.ppf(0.975))  # the normal quantile of a two-sided 95 % interval

DRAWS = 10_000
FEWER = 500  # draws of what takes longer than a mean
OFTEN = 0.8  # of the draws have a number of two prompts (.86); of one prompt .63 have it
_AT_ONCE = 2**22  # numbers drawn at a time

Result = tuple[str, str, float]  # two names, and 1 where the first won, 0 the second, 0.5 a tie


def summarize_scores(values: Tensor, tags: list[str]) -> dict[str, Any]:
    """Average scores [n] per tag, then over tags -> {"mean", "interval", "images", "tasks": {tag:
    {...}}}.

    A task of right and wrong images has Wilson's interval, another one Student's t; of one image,
    whose spread nobody knows, it has the spread of the other tasks, and no width where these have
    none either. The overall interval adds the squares of the tasks' distances from mean to lower
    end, and to upper end, each apart (Newcombe 1998; Zou and Donner 2008): tasks where all or no
    images hit still have a width."""
    # each task by itself
    tasks: dict[str, Any] = {}
    parts = {}
    for tag in dict.fromkeys(tags):
        parts[tag] = values[torch.tensor([own == tag for own in tags])].double()
    spread = _pooled([part for part in parts.values() if len(part) > 1])
    for tag, mine in parts.items():
        mean, n = mine.mean().item(), len(mine)
        binary = bool(((mine == 0) | (mine == 1)).all())
        half = Z95 * spread
        if n > 1:
            half = float(t.ppf(0.975, n - 1)) * math.sqrt(mine.var(correction=1).item() / n)
        interval = list(wilson(round(mean * n), n)) if binary else [mean - half, mean + half]
        tasks[tag] = {"mean": mean, "interval": interval, "images": n}
    # the mean over tasks, and the squared distances to both ends added
    overall = sum(task["mean"] for task in tasks.values()) / len(tasks)
    below, above = [], []
    for one in tasks.values():
        below.append((one["mean"] - one["interval"][0]) ** 2)
        above.append((one["mean"] - one["interval"][1]) ** 2)
    low = overall - math.sqrt(sum(below)) / len(tasks)
    high = overall + math.sqrt(sum(above)) / len(tasks)
    return {
        "mean": overall,
        "interval": [low, high],
        "images": len(tags),
        "tasks": tasks,
    }


def _pooled(parts: Sequence[Tensor]) -> float:
    """Return the std within parts [n], pooled; 0 where there are none."""
    freedom = sum(len(part) - 1 for part in parts)
    squares = sum(part.var(correction=1).item() * (len(part) - 1) for part in parts)
    return math.sqrt(squares / freedom) if freedom else 0.0


def summarize_apart(values: Tensor, tags: list[str], held: Tensor) -> dict[str, Any]:
    """Summarize scores [n] of prompts without and with a mark `held` [n] -> {"seen", "held_out"}:
    two summaries that can be compared, since both are over the tasks that have prompts of either
    kind; {} if no task has both."""
    marks = held.tolist()
    with_mark = {tag for tag, mark in zip(tags, marks, strict=True) if mark}
    without = {tag for tag, mark in zip(tags, marks, strict=True) if not mark}
    common = torch.tensor([tag in with_mark & without for tag in tags])
    if not common.any():
        return {}
    out = {}
    for name, chosen in (("seen", common & ~held), ("held_out", common & held)):
        own = [tags[i] for i in chosen.nonzero()[:, 0].tolist()]
        out[name] = summarize_scores(values[chosen], own)
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
    mean = scores.nanmean().item()
    return mean if math.isfinite(mean) else None


def prompt_means(
    each: list[list[float]], records: Sequence[Mapping[str, Any]]
) -> dict[str, list[float | None]]:
    """Average the scores of each prompt, without those that are NaN -> {tag: [mean]}."""
    out: dict[str, list[float | None]] = {}
    for values, record in zip(each, records, strict=True):
        known = [value for value in values if not math.isnan(value)]
        mean = round(sum(known) / len(known), 6) if known else None
        out.setdefault(str(record.get("tag", "all")), []).append(mean)
    return out


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    tags: Sequence[str],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare scores [P, S] of P prompts and S images each, `first` minus `second` ->
    {"difference", "interval", "better", "tasks"}.

    The difference is the mean over tasks of the means over a task's prompts. Prompts are drawn
    again within each task, with all their images under both models: what makes a prompt easy for
    both drops out, and the luck of single images is in the prompts' means (a cluster bootstrap;
    Davison and Hinkley 1997, section 3.8). The interval holds 95 % (percentiles); "better" is the
    share of draws above 0, where a tie counts half. NaN = not scored: such an image counts in
    neither model's mean. Raises DataError for shapes that differ and a prompt without any pair.
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
    # each task by itself, then the mean over tasks
    rng = np.random.default_rng(seed)
    names, named = list(dict.fromkeys(tags)), np.array(tags)
    tasks, every = {}, []
    for name in names:
        mine = values[named == name]
        drawn = _means(mine, draws, rng)
        tasks[name] = {**_summary(float(mine.mean()), drawn), "prompts": len(mine)}
        every.append(drawn)
    overall = float(np.mean([task["difference"] for task in tasks.values()]))
    return {**_summary(overall, np.mean(every, 0)), "tasks": tasks, "draws": draws}


def resampled(
    measure: Callable[[list[Any]], dict[str, float]],
    prompts: Sequence[Sequence[Any]],
    *,
    draws: int = FEWER,
    seed: int = 0,
) -> dict[str, tuple[float, float] | None]:
    """Return the 95 % interval of each number that `measure` makes of a list of images' rows.

    `prompts` are the rows of each prompt's images; prompts are drawn again with all of their images
    (a cluster bootstrap, percentiles). None for a number that one prompt alone decides.
    """
    rng, found = np.random.default_rng(seed), dict[str, list[float]]()
    for _ in range(draws):
        rows: list[Any] = []
        for place in rng.integers(len(prompts), size=len(prompts)):
            rows += prompts[place]
        for name, value in measure(rows).items():
            found.setdefault(name, []).append(value)
    intervals: dict[str, tuple[float, float] | None] = {}
    for name, values in found.items():
        low, high = np.percentile(values, [2.5, 97.5])
        often = len(prompts) > 1 and len(values) >= OFTEN * draws
        intervals[name] = (float(low), float(high)) if often else None
    return intervals


def _means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Return means [draws] of as many values, drawn with replacement."""
    step = max(1, _AT_ONCE // len(values))
    parts = []
    for start in range(0, draws, step):
        chosen = rng.integers(0, len(values), (min(step, draws - start), len(values)))
        parts.append(values[chosen].mean(1))
    return np.concatenate(parts)


def _summary(difference: float, drawn: np.ndarray) -> dict[str, Any]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    better = float((drawn > 0).mean() + (drawn == 0).mean() / 2)
    return {"difference": difference, "interval": [float(low), float(high)], "better": better}


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
