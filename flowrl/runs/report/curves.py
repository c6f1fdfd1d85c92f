"""Draw the logs of a run folder as curves: held-out score, reward, KL, time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator

from flowrl.core.errors import RunError
from flowrl.runs.folder import (
    TIMING,
    Evaluation,
    Rows,
    RunPath,
    read_evals,
    read_metrics,
    read_rows,
)
from flowrl.runs.report.columns import Series, by_task, phases_of, series, totals
from flowrl.runs.report.style import PALETTE, grid_along, styled

# metric -> title, label of the axis
PANELS = {
    "reward": ("Training reward", "mean reward"),
    "approx_kl": ("Policy change per iteration", "mean of r - 1 - log r"),
    "ratio_std": ("Spread of the likelihood ratio", "std of the ratio"),
    "grad_norm": ("Gradient norm", "L2 norm"),
}
OF_RATIO = ("approx_kl", "ratio_std")


@styled
def curves(run: RunPath) -> Figure:
    """Draw held-out score, training reward, KL, ratio spread, gradient norm and time; what a run
    lacks is left out, and what cannot move with one update an iteration.

    Faint lines are raw, strong ones the centred mean of about a twentieth of the run; whiskers are
    the intervals of the evaluations. Raises RunError if the folder is no run, a line is malformed
    or there is nothing to draw.
    """
    # what there is to draw
    metrics, evals, timing = read_metrics(run), read_evals(run), read_rows(run, TIMING)
    panels: list[Callable[[Axes], None]] = []
    if evals:
        panels.append(partial(_draw_evals, evals=evals))
    for key, (title, label) in PANELS.items():
        line = series(metrics, key)
        if np.isfinite(line.y).any() and not (key in OF_RATIO and _on_policy(metrics)):
            panels.append(partial(_draw_metric, line=line, title=title, label=label))
    if timing:
        panels.append(partial(_draw_timing, rows=timing))
    if not panels:
        raise RunError(
            f"{run} holds nothing to draw yet: no metric, evaluation or timing was written"
        )
    # panels in rows of three, four of them as two by two
    columns = min(3, len(panels))
    if len(panels) == 4:
        columns = 2
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.7 * columns, 3.1 * rows), layout="constrained")
    for index, panel in enumerate(panels):
        panel(figure.add_subplot(rows, columns, index + 1))
    return figure


def _on_policy(metrics: Rows) -> bool:
    """Say whether the ratio never moved by more than rounding: with one update an iteration its
    curves are flat by construction."""
    spread, gap = series(metrics, "ratio_std").y, series(metrics, "on_policy_gap").y
    known = np.isfinite(spread)
    return bool(known.any() and (spread[known] <= gap[known]).all())


# --------------------------------------------------------------------------------------- the lines


def _window(count: int) -> int:
    return max(1, count // 20) | 1


def _smooth(line: Series) -> Series:
    """Take the centred mean of what was measured; the window shrinks at both ends."""
    good = np.isfinite(line.y)
    if not good.any():
        return line
    kernel = np.ones(_window(len(line.y)))
    total = np.convolve(np.where(good, line.y, 0.0), kernel, "same")
    count = np.convolve(good.astype(float), kernel, "same")
    return Series(line.x, np.where(count > 0.5, total / np.maximum(count, 1.0), np.nan))


# -------------------------------------------------------------------------------------- the panels


def _style(axes: Axes, title: str, label: str) -> None:
    grid_along(axes)
    axes.set_title(title, fontsize=10.5, fontweight="bold", pad=8)
    axes.set_xlabel("iteration")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_BySpan())
    axes.margins(x=0.02)


class _BySpan(Formatter):
    """Write ticks with as many digits as tell neighbours apart, all alike."""

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Write all ticks of an axis."""
        return tick_texts(values)

    def __call__(self, value: float, pos: int | None = None) -> str:
        """Write one value, as under the pointer."""
        return tick_texts([value])[0]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Write the ticks of an axis with as many digits as their distance needs: 0.995, 1.000, 1.005;
    0.00001 is 1e-5."""
    ordered = np.unique(np.array(values, float))
    most = float(np.abs(ordered).max(initial=0.0))
    step = most or 1.0
    if len(ordered) > 1:
        step = float(np.diff(ordered).min())
    if most and not 1e-3 <= most < 1e5:
        # digits of a power of ten, from the first of the largest to that of the distance
        scale = math.floor(math.log10(most))
        digits = max(0, scale - math.floor(math.log10(step) + 1e-9))
        return [_in_powers(value, digits) for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:.{digits}f}" if value else "0" for value in values]


def _in_powers(value: float, digits: int) -> str:
    """Write a number as 1.5e-5, and what rounds to zero as 0."""
    number, _, power = f"{value:.{digits}e}".partition("e")
    if float(number) == 0:
        return "0"
    return f"{number}e{int(power)}"


def _draw_metric(axes: Axes, *, line: Series, title: str, label: str) -> None:
    _style(axes, title, label)
    if _window(len(line.y)) > 1:
        axes.plot(*line, color=PALETTE[0], alpha=0.25, linewidth=0.8)
    marker = ""
    if len(line.x) == 1:
        marker = "o"
    axes.plot(*_smooth(line), color=PALETTE[0], linewidth=1.8, marker=marker, markersize=4)


def _draw_evals(axes: Axes, *, evals: Sequence[Evaluation]) -> None:
    """Draw the score of all images with its intervals, and faintly that of each task."""
    name, whole, tasks = evals[-1].name, "all", by_task(evals)
    _style(axes, "Held-out prompts", f"{name} score")
    # one task alone is all images: it is drawn, and named, once
    if len(tasks) == 1:
        whole, _ = tasks.popitem()
    # the tasks
    labels = []
    for index, (task, line) in enumerate(tasks.items()):
        color = PALETTE[1 + index % (len(PALETTE) - 1)]
        axes.plot(*line, color=color, linewidth=0.9, alpha=0.6)
        labels.append((line.y[-1], task.replace("_", " "), color))
    # all images
    x, mean, lows, highs = totals(evals)
    axes.vlines(x, lows, highs, color=PALETTE[0], linewidth=1.4)
    axes.plot(x, mean, color=PALETTE[0], linewidth=2, marker="o", markersize=3.5)
    # of an accuracy all of its range
    low, high = axes.get_ylim()
    if low >= -0.1 and 0.5 < high <= 1.1:
        axes.set_ylim(-0.02, 1.02)
    _end_labels(axes, [(mean[-1], whole.replace("_", " "), PALETTE[0]), *labels])


def _draw_timing(axes: Axes, *, rows: Rows) -> None:
    """Stack the phases; one that most iterations lack, such as evaluation, is spread evenly over
    the run."""
    _style(axes, "Time per iteration", "seconds")
    x, seconds = series(rows, "iteration").x, _phases(rows)
    # a band per phase, and its name and mean beside its right end
    layers, labels, top = [], [], 0.0
    for (name, y), color in zip(seconds.items(), itertools.cycle(PALETTE), strict=False):
        layer = np.full(len(x), y.mean())
        if (y > 0).mean() > 0.5:
            layer = _smooth(Series(x, y)).y
        layers.append(layer)
        top += layer[-1]
        labels.append((top - layer[-1] / 2, f"{name.replace('_', ' ')} {y.mean():.2g} s", color))
    axes.stackplot(x, layers, colors=PALETTE, alpha=0.75, linewidth=0)
    axes.set_ylim(bottom=0)
    _end_labels(axes, labels)


def _phases(rows: Rows) -> dict[str, np.ndarray]:
    """Return the seconds [N] of each phase; what else took time is "other"."""
    seconds = {name: np.nan_to_num(series(rows, name).y) for name in phases_of(rows)}
    total = series(rows, "total").y
    rest = total - sum(seconds.values(), np.zeros(len(rows)))
    if np.nansum(rest) > 0.01 * np.nansum(total):
        # rounding leaves a little below zero
        seconds["other"] = np.maximum(np.nan_to_num(rest), 0.0)
    return seconds


def _end_labels(axes: Axes, labels: Iterable[tuple[float, str, str]]) -> None:
    """Name lines at their right end, (height, text, colour), moved apart where they would
    overlap."""
    (low, high), gap = axes.get_ylim(), 0.068
    known = sorted((label for label in labels if math.isfinite(label[0])), key=itemgetter(0))
    # from below each at least a gap above the last one, then from above back into the axes
    places = [(height - low) / (high - low) for height, _, _ in known]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    top = 1.0
    for i in reversed(range(len(places))):
        places[i] = top = min(places[i], top)
        top -= gap
    look: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 7.5, "va": "center"}
    for place, (_, text, color) in zip(places, known, strict=True):
        axes.text(1.015, place, text, color=color, **look)
