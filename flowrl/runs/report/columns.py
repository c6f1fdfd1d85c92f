"""The logs of a run as columns of numbers, and as the curves that a page draws, by title."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.files import finite_or_none, is_finite_number
from flowrl.runs.folder import Evaluation, Rows

MOST = 300  # points of a curve


NO_PHASE = ("iteration", "total", "images_per_s")  # keys of timing.jsonl that are no phase
Panel = dict[str, Any]

# metric -> title of its panel; several of one title share it
METRICS = {
    "reward": "Training reward",
    "approx_kl": "Policy change per iteration",
    "kl": "KL to the reference",
    "kl_share": "KL's share of the loss",
    "kl_weight": "Weight of the KL",
    "velocity_length": "Length of the velocity over the reference's",
    "ratio": "Mean likelihood ratio",
    "ratio_std": "Spread of the likelihood ratio",
    "clip_frac": "Share of clipped decisions",
    "grad_norm": "Gradient norm",
    "zero_std": "Groups without spread (zero std)",
    "reward_std": "Reward spread within groups",
    "diversity": "Distance of a group's images",
    "saturation": "Saturation of images",
    "sharpness": "Sharpness of images",
    "grid": "Grid energy of images",
    "prompt_entropy": "Entropy of prompts used",
    "lr": "Learning rate",
}
STEPS = {
    "ratio": "Ratio, mean",
    "ratio_std": "Ratio, spread",
    "approx_kl": "Policy change",
    "kl": "KL to the reference",
    "clip_frac": "Clipped share",
    "velocity_grad": "Gradient norm at the velocity",
    "velocity_length": "Length of the velocity over the reference's",
}


# what a panel answers
BETTER, LEARNING, SAFE, SPEED = "Is it better?", "Is it learning?", "Is it safe?", "Time"
GROUP_OF = {"reward": LEARNING, "reward_std": LEARNING, "zero_std": LEARNING, "lr": LEARNING}
GROUP_OF |= {"prompt_entropy": LEARNING, "kl_share": LEARNING, "kl_weight": LEARNING}
# metric -> key of the config that says where its monitor speaks, and on which side that is
BANDS = {
    "zero_std": ("monitors.zero_std.share", "above"),
    "prompt_entropy": ("monitors.prompts.entropy", "below"),
    "ratio_std": ("monitors.ratio.spread", "above"),
    "clip_frac": ("monitors.ratio.clip", "above"),
}


class Series(NamedTuple):
    """One curve; NaN where nothing was measured."""

    x: np.ndarray  # [N] iterations
    y: np.ndarray  # [N]


def series(rows: Iterable[Mapping[str, Any]], key: str) -> Series:
    """Return one number of every row; NaN where a row lacks it."""
    x, y = [], []
    for row in rows:
        x.append(row["iteration"])
        y.append(row.get(key))
    return Series(np.array(x, float), np.array(y, float))


def phases_of(timing: Rows) -> list[str]:
    """Return the names of the phases of a run, in the order in which they came."""
    return [key for key in _keys(timing) if key not in NO_PHASE]


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return every key of some rows once."""
    return list(dict.fromkeys(chain.from_iterable(rows)))


def totals(evals: Sequence[Evaluation]) -> np.ndarray:
    """Return iteration, score, and the low and high end of its interval [4, N]."""
    rows = [(row.iteration, row.total.mean, row.total.low, row.total.high) for row in evals]
    return np.array(rows, float).T


def by_task(evals: Sequence[Evaluation]) -> dict[str, Series]:
    """Return the score of each task that was judged."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in evals:
        for task, score in row.tasks.items():
            rows.setdefault(task, []).append({"iteration": row.iteration, "mean": score.mean})
    return {task: series(some, "mean") for task, some in rows.items()}


def thinned(line: Series, most: int = MOST) -> Series:
    """Return a curve of at most `most` points: the means of equal stretches of it, as many rows as
    a power of two, so that points stay as they are while the curve grows, but for the last."""
    wide = 1
    while wide * most < len(line.x):
        wide *= 2
    if wide == 1:
        return line
    x, y = [], []
    for start in range(0, len(line.x), wide):
        places, values = line.x[start : start + wide], line.y[start : start + wide]
        known, mean = values[np.isfinite(values)], np.nan
        if len(known):
            mean = known.mean()
        x.append(places.mean())
        y.append(mean)
    return Series(np.array(x), np.array(y))


def json_numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON has them: six digits, null for what is not finite."""
    return [finite_or_none(float(f"{value:.6g}")) for value in values]


def panels(
    metrics: Rows,
    evals: Sequence[Evaluation],
    timing: Rows,
    limits: Mapping[str, Any] | None = None,
) -> list[Panel]:
    """Return ``{"title", "group", "band"?, "lines": [{"name", "x", "y", "low"?,
    "high"?}]}`` for each panel that has something measured, long curves thinned. `limits` is the
    run's config by dotted key: bands begin where its monitors speak."""
    found: list[Panel] = []
    if evals:
        found.append(_held_out(evals))
    for key, title in METRICS.items():
        lines = [_line("all", series(metrics, key))]
        panel: Panel = {"title": title, "group": GROUP_OF.get(key, SAFE)}
        limit, side = BANDS.get(key, ("", ""))
        value = (limits or {}).get(limit)
        if is_finite_number(value):
            panel["band"] = {"limit": float(value), "side": side}
        found.append({**panel, "lines": lines})
    names = sorted(key for key in _keys(metrics) if key.startswith("reward/"))
    if len(names) > 1:
        lines = [_line(name.partition("/")[2], series(metrics, name)) for name in names]
        found.append({"title": "Each reward", "group": LEARNING, "lines": lines})
    if timing:
        lines = [_line(name, series(timing, name)) for name in ("total", *phases_of(timing))]
        found.append({"title": "Seconds by phase", "group": SPEED, "lines": lines})
    return [panel for panel in found if _measured(panel)]


def by_step(metrics: Rows) -> list[Panel]:
    """Return ``{"title", "steps", "x", "rows"}`` of what was logged by denoising step: a row of
    values per step, a column per stretch of iterations."""
    found = []
    for name, title in STEPS.items():
        steps = _steps(metrics, name)
        if not steps:
            continue
        lines = [thinned(series(metrics, f"{name}/step{step}"), 60) for step in steps]
        rows = [json_numbers(line.y) for line in lines]
        found.append({"title": title, "steps": steps, "x": json_numbers(lines[0].x), "rows": rows})
    return found


def _held_out(evals: Sequence[Evaluation]) -> Panel:
    x, mean, low, high = totals(evals).tolist()
    ends = {"low": json_numbers(low), "high": json_numbers(high)}
    lines = [{"name": "all", "x": x, "y": json_numbers(mean), **ends}]
    # one task alone is all images: it has one line, and one entry of the legend
    tasks = by_task(evals)
    if len(tasks) > 1:
        for task, line in tasks.items():
            lines.append({"name": task, "x": line.x.tolist(), "y": json_numbers(line.y)})
    title = f"Held-out {evals[-1].name} score"
    return {"title": title, "group": BETTER, "lines": lines}


def _line(name: str, line: Series) -> dict[str, Any]:
    few = thinned(line)
    return {"name": name, "x": json_numbers(few.x), "y": json_numbers(few.y)}


def _measured(panel: Panel) -> bool:
    panel["lines"] = [line for line in panel["lines"] if {*line["y"]} - {None}]
    return bool(panel["lines"])


def _steps(metrics: Rows, name: str) -> list[int]:
    pattern = re.compile(re.escape(name) + r"/step(\d{1,9})")
    found = []
    for key in _keys(metrics):
        match = pattern.fullmatch(key)
        if match:
            found.append(int(match[1]))
    return sorted(found)
