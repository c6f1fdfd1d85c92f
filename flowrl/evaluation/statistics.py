"""Means with intervals over images and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.stats import binomtest, norm, t
from torch import Tensor

from flowrl.core.errors import ConfigError

Z95 = float(norm.ppf(0.975))  # the normal quantile of a two-sided 95 % interval


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
    below = math.sqrt(sum((one["mean"] - one["interval"][0]) ** 2 for one in tasks.values())) / len(
        tasks
    )
    above = math.sqrt(sum((one["mean"] - one["interval"][1]) ** 2 for one in tasks.values())) / len(
        tasks
    )
    return {
        "mean": overall,
        "interval": [overall - below, overall + above],
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
