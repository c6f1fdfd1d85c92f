"""Read the logs of a run folder and draw them as curves. Only this and comparison_*.py import matplotlib."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from flowrl.errors import DataError, RunError

RunPath = str | os.PathLike[str]
Rows = list[dict[str, Any]]
METRICS, TIMING, EVALS = "metrics.jsonl", "timing.jsonl", "eval.jsonl"
PALETTE = ("#1f5fbf", "#d1602b", "#3c8d53", "#8c4fa8", "#b8860b", "#2a9aa8", "#b03060", "#6b6b6b")
INK, QUIET, RULE = "#222222", "#6e6e6e", "#ececec"
PANELS = {
    "reward": ("Training reward", "mean reward"),
    "approx_kl": ("Policy change per iteration", "mean of r - 1 - log r"),
    "ratio_std": ("Spread of the likelihood ratio", "std of the ratio"),
    "grad_norm": ("Gradient norm", "L2 norm"),
}


class Series(NamedTuple):
    """One curve; NaN where nothing was measured."""

    x: np.ndarray  # [N] iterations
    y: np.ndarray  # [N]


class Score(NamedTuple):
    """One mean over pictures with its interval; NaN and None where unknown."""

    mean: float
    low: float
    high: float
    images: int | None


class Evaluation(NamedTuple):
    """One held-out evaluation: the headline score and each task's."""

    iteration: int
    name: str
    total: Score
    tasks: dict[str, Score]


def curves(run: RunPath) -> Figure:
    """Draw held-out score, training reward, KL, ratio spread, gradient norm and time; what a run lacks is left out.

    Faint lines are raw, strong ones the centred mean of about a twentieth of the run; whiskers are the intervals of
    the evaluations. Raises RunError if the folder is no run, a line is malformed or there is nothing to draw.
    """
    metrics, evals, timing = read_metrics(run), read_evals(run), read_rows(run, TIMING)
    panels: list[Callable[[Axes], None]] = []
    if evals:
        panels.append(lambda axes: _draw_evals(axes, evals))
    for key in PANELS:
        if np.isfinite(_series(metrics, key).y).any():
            panels.append(lambda axes, key=key: _draw_metric(axes, _series(metrics, key), *PANELS[key]))  # type: ignore[misc]
    if timing:
        panels.append(lambda axes: _draw_timing(axes, timing))
    if not panels:
        raise RunError(f"{run} holds nothing to draw yet: no metric, evaluation or timing was written")
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(4.7 * columns, 3.1 * rows)
    for index, panel in enumerate(panels):
        panel(figure.add_subplot(rows, columns, index + 1))
    return figure


def compare_curves(runs: Sequence[RunPath]) -> Figure:
    """Draw reward and held-out score of several seeds of one config: each run faint, their mean strong.

    The mean covers the iterations that every run has. Raises DataError without runs or if their scores differ,
    RunError as `curves`.
    """
    if not runs:
        raise DataError("expected at least one run folder to compare, got none")
    evals = [read_evals(run) for run in runs]
    names = sorted({row.name for rows in evals for row in rows})
    if len(names) > 1:
        raise DataError(f"expected runs evaluated by one score, got {', '.join(names)}")
    rewards = [_smooth(_series(read_metrics(run), "reward")) for run in runs]
    panels = [(*PANELS["reward"], rewards, "")]
    if names:
        panels.insert(0, ("Held-out prompts", f"{names[0]} score", [_totals(rows) for rows in evals], "o"))
    panels = [panel for panel in panels if any(np.isfinite(line.y).any() for line in panel[2])]
    if not panels:
        raise RunError(f"{', '.join(str(run) for run in runs)}: nothing to draw, neither rewards nor evaluations")
    figure = _figure(5.4 * len(panels), 3.5)
    for index, (title, label, lines, marker) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        _style(axes, title, label)
        for number, line in enumerate(lines):
            name = f"each of {len(lines)} runs" if number == 0 else None
            axes.plot(line.x, line.y, color=PALETTE[0], alpha=0.3, linewidth=1, label=name)
        mean = _mean(lines)
        axes.plot(mean.x, mean.y, color=PALETTE[0], linewidth=2, marker=marker, markersize=3.5, label="their mean")
        axes.legend(frameon=False, fontsize=8, loc="lower right", labelcolor=INK)
    return figure


def read_rows(run: RunPath, name: str) -> Rows:
    """Read a log of one object per line, each with its iteration; [] if there is none.

    A torn last line, as a killed or running process leaves it, is left out. Raises RunError naming file and line.
    """
    path, rows = Path(run) / name, []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise RunError(f"{path}, line {number}: expected a JSON object, got {_short(line)}: {error}") from error
        if not isinstance(row, dict) or not _whole(row.get("iteration")):
            raise RunError(f"{path}, line {number}: expected an object with a whole iteration, got {_short(line)}")
        rows.append(row)
    return rows


def read_metrics(run: RunPath) -> Rows:
    """Read the metrics of a run, [] before its first iteration. Raises RunError if the folder is no run."""
    files = (METRICS, EVALS, "config.yaml")
    if not any((Path(run) / name).is_file() for name in files):
        raise RunError(f"{run} is not a run folder: expected {', '.join(files[:-1])} or {files[-1]} in it")
    return read_rows(run, METRICS)


def read_evals(run: RunPath) -> list[Evaluation]:
    """Read the held-out evaluations of a run, [] without any. Raises RunError naming file and line."""
    found = []
    for number, row in enumerate(read_rows(run, EVALS), 1):
        try:
            found.append(evaluation(row))
        except DataError as error:
            raise RunError(f"{Path(run) / EVALS}, line {number}: {error}") from error
    return found


def evaluation(row: Mapping[str, Any]) -> Evaluation:
    """Check one evaluation: {iteration, score: name, <name>: mean, interval, tasks}. Raises DataError."""
    name, tasks = row.get("score"), row.get("tasks", {})
    if not isinstance(name, str) or name not in row:
        raise DataError(f'expected "score" to name one of the keys {", ".join(row)}; got {name!r}')
    if not isinstance(tasks, dict) or not all(isinstance(task, dict) for task in tasks.values()):
        raise DataError(f'expected "tasks" to be {{task: {{"mean", "interval", "images"}}}}, got {tasks!r}')
    scores = {task: _score(values, "mean", f"task {task!r}") for task, values in tasks.items()}
    counts = [score.images for score in scores.values() if score.images is not None]
    images = sum(counts) if counts and len(counts) == len(scores) else None
    total = _score(row, name, f"score {name!r}")
    if not _whole(row.get("iteration")):
        raise DataError(f"expected a whole iteration, got {row.get('iteration')!r}")
    return Evaluation(
        row["iteration"], name, total if total.images is not None else total._replace(images=images), scores
    )


def _score(row: Mapping[str, Any], key: str, where: str) -> Score:
    interval, images = row.get("interval"), row.get("images")
    if interval is None:
        interval = [None, None]
    if not isinstance(interval, list | tuple) or len(interval) != 2:
        raise DataError(f"{where}: expected an interval [low, high], got {interval!r}")
    if images is not None and not _whole(images):
        raise DataError(f"{where}: expected a whole number of images, got {images!r}")
    mean, low, high = (_number(value, where) for value in (row.get(key), *interval))
    return Score(mean, low, high, images)


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: expected a number or null, got {value!r}")
    return float(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _series(rows: Iterable[Mapping[str, Any]], key: str) -> Series:
    try:
        points = [(row["iteration"], _number(row.get(key), f"iteration {row['iteration']}, {key}")) for row in rows]
    except DataError as error:
        raise RunError(str(error)) from error
    return Series(np.array([x for x, _ in points], float), np.array([y for _, y in points], float))


def _totals(rows: Sequence[Evaluation]) -> Series:
    return Series(np.array([row.iteration for row in rows], float), np.array([row.total.mean for row in rows], float))


def _window(count: int) -> int:
    return max(1, count // 20) | 1


def _smooth(line: Series) -> Series:
    """Take the centred mean of what was measured; the window shrinks at both ends."""
    kernel = np.ones(_window(len(line.y)))
    good = np.isfinite(line.y)
    if not good.any():
        return line
    total, count = (np.convolve(values, kernel, "same") for values in (np.where(good, line.y, 0.0), good.astype(float)))
    return Series(line.x, np.where(count > 0.5, total / np.maximum(count, 1.0), np.nan))


def _mean(lines: Sequence[Series]) -> Series:
    """Average runs over the iterations where every one of them has a value."""
    known = [{x: y for x, y in zip(*line, strict=True) if math.isfinite(y)} for line in lines]
    common = sorted(set.intersection(*(set(values) for values in known)))
    return Series(np.array(common), np.array([np.mean([values[x] for values in known]) for x in common]))


def _figure(width: float, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
    return Figure(figsize=(width, height), layout=layout)


def _style(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel("iteration", fontsize=8.5, color=QUIET)
    axes.set_ylabel(label, fontsize=8.5, color=QUIET)
    axes.tick_params(labelsize=8, colors=QUIET, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: re.sub(r"e([+-])0*", r"e\1", f"{value:.4g}").replace("e+", "e"))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")


def _draw_metric(axes: Axes, line: Series, title: str, label: str) -> None:
    _style(axes, title, label)
    smooth = _smooth(line)
    if _window(len(line.y)) > 1:
        axes.plot(line.x, line.y, color=PALETTE[0], alpha=0.25, linewidth=0.8)
    axes.plot(smooth.x, smooth.y, color=PALETTE[0], linewidth=1.8, marker="o" if len(line.x) == 1 else "", markersize=4)


def _draw_evals(axes: Axes, evals: Sequence[Evaluation]) -> None:
    name, labels = evals[-1].name, []
    _style(axes, "Held-out prompts", f"{name} score")
    for index, task in enumerate(dict.fromkeys(task for row in evals for task in row.tasks)):
        color = PALETTE[1 + index % (len(PALETTE) - 1)]
        points = [(row.iteration, row.tasks[task].mean) for row in evals if task in row.tasks]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, alpha=0.6)
        labels.append((points[-1][1], task.replace("_", " "), color))
    total = _totals(evals)
    axes.vlines(total.x, [e.total.low for e in evals], [e.total.high for e in evals], color=PALETTE[0], linewidth=1.4)
    axes.plot(*total, color=PALETTE[0], linewidth=2, marker="o", markersize=3.5)
    low, high = axes.get_ylim()
    if low >= -0.1 and 0.5 < high <= 1.1:  # an accuracy: show all of its range
        axes.set_ylim(-0.02, 1.02)
    _end_labels(axes, [(total.y[-1], "all", PALETTE[0]), *labels])


def _draw_timing(axes: Axes, rows: Rows) -> None:
    """Stack the phases; one that most iterations lack, such as evaluation, is spread evenly over the run."""
    _style(axes, "Time per iteration", "seconds")
    skip = ("iteration", "total", "images_per_s")
    names = list(dict.fromkeys(key for row in rows for key in row if key not in skip))
    seconds = {name: np.nan_to_num(_series(rows, name).y) for name in names}
    rest = _series(rows, "total").y - sum(seconds.values(), np.zeros(len(rows)))
    if np.nansum(rest) > 0.01 * np.nansum(_series(rows, "total").y):
        seconds["other"] = np.maximum(np.nan_to_num(rest), 0.0)  # rounding leaves a little below zero
    x = _series(rows, "iteration").x
    layers = [_smooth(Series(x, y)).y if (y > 0).mean() > 0.5 else np.full(len(x), y.mean()) for y in seconds.values()]
    colors = [PALETTE[index % len(PALETTE)] for index in range(len(layers))]
    axes.stackplot(x, layers, colors=colors, alpha=0.75, linewidth=0)
    axes.set_ylim(bottom=0)
    tops = np.cumsum([layer[-1] for layer in layers])
    texts = [f"{name.replace('_', ' ')} {y.mean():.2g} s" for name, y in seconds.items()]
    middles = [top - layer[-1] / 2 for top, layer in zip(tops, layers, strict=True)]
    _end_labels(axes, list(zip(middles, texts, colors, strict=True)))


def _end_labels(axes: Axes, labels: Iterable[tuple[float, str, str]]) -> None:
    """Name lines at their right end, (height, text, colour), moved apart where they would overlap."""
    (low, high), gap = axes.get_ylim(), 0.068
    known = sorted((label for label in labels if math.isfinite(label[0])), key=lambda label: label[0])
    places = [(height - low) / (high - low) for height, _, _ in known]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    top = 1.0
    for i in reversed(range(len(places))):
        places[i] = top = min(places[i], top)
        top -= gap
    for place, (_, text, color) in zip(places, known, strict=True):
        axes.text(1.015, place, text, transform=axes.transAxes, color=color, fontsize=7.5, va="center")
