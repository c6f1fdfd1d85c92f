"""Is one model better than another on the same prompts: a paired bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrl.core.errors import DataError

DRAWS = 10_000
FEWER = 500  # draws of what takes longer than a mean
OFTEN = 0.8  # of the draws have a number of two prompts (.86); of one prompt .63 have it
_AT_ONCE = 2**22  # numbers drawn at a time


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
