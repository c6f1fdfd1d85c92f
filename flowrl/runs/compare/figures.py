"""Draw a comparison from its result file: gains, held-out curves, training; and the pages, axes
and names that its figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from flowrl.runs.compare.summary import (
    LETTERS,
    CurvePoint,
    Result,
    judged_at,
    labels,
    mean_curve,
)
from flowrl.runs.compare.tables import clock, units
from flowrl.runs.report.style import EDGE, INK, PALETTE, QUIET, grid_along, styled

DASHED = (0, (4, 3))


OWN, BEST, OTHER = PALETTE[0], PALETTE[1], "#d4d4d4"
Line = tuple[np.ndarray, np.ndarray]


def new_figure(width: float, height: float, title: str, note: str = "") -> Figure:
    """Make a figure of so many inches with a heading at its top left."""
    figure = Figure(figsize=(width, height))
    left, top = 0.14 / width, 1 - 0.12 / height
    figure.text(left, top, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.37 / height, note, fontsize=8, color=QUIET, va="top")
    return figure


def cells(
    figure: Figure,
    rows: int,
    columns: int,
    *,
    left: float,
    top: float,
    bottom: float,
    **space: Any,
) -> GridSpec:
    """Lay out axes with margins in inches; the right one is a sixth."""
    width, height = figure.get_size_inches()
    box = {
        "left": left / width,
        "right": 1 - 0.17 / width,
        "top": 1 - top / height,
        "bottom": bottom / height,
    }
    return figure.add_gridspec(rows, columns, **box, **space)


def plain_axes(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Leave one faint grid, and small numbers at the ticks."""
    grid_along(axes, grid)
    axes.tick_params(labelsize=7.5)


def ticks(axes: Axes, *, y: int) -> None:
    """Take round ticks, at most `y` of them upwards, and thousands as 20k."""
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.yaxis.set_major_locator(MaxNLocator(y, steps=[1, 2, 5, 10]))


def _thousands(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def legend(figure: Figure, entries: Sequence[Any]) -> None:
    """Set a legend under the heading, in two rows where the page is narrow."""
    width, height = figure.get_size_inches()
    place, columns = (0.06 / width, 1 - 0.33 / height), len(entries) if width > 8 else 3
    figure.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=place,
        ncols=columns,
        columnspacing=1.4,
        labelcolor=QUIET,
        handlelength=1.6,
    )


def names(result: Result) -> dict[str, str]:
    """Return the configs' short names, with the number of runs that failed."""
    short = labels([config["name"] for config in result["configs"]])
    failed = {}
    for config in result["configs"]:
        failed[config["name"]] = sum(run["failed"] is not None for run in config["seeds"])
    return {
        name: text + (f" ({failed[name]} failed)" if failed[name] else "")
        for name, text in short.items()
    }


def axis(result: Result, budget: str) -> str:
    """Name what a budget counts."""
    return "network evaluations" if budget == "nfe" else f"{clock(result)} of training"


def margin(result: Result, size: float) -> float:
    """Return the inches that the longest name takes at a font size."""
    return 0.3 + 0.0086 * size * max(len(name) for name in names(result).values())


def number(result: Result, value: float) -> str:
    """Set a score as the tables do."""
    factor, digits, _ = units(result)
    return f"{factor * value:.{digits}f}"


def score_name(result: Result) -> str:
    """Name the headline score and its unit."""
    return f"{result['settings']['score']} score" + (
        f" in{units(result)[2]}" if units(result)[2] else ""
    )


TRACES = {
    "reward": ("Training reward", False),
    "ratio_std": ("Spread of the ratio (log)", True),
    "diversity": ("Diversity within a prompt", False),
}  # title, logarithmic


@styled
def gains_figure(result: Result) -> Figure:
    """Draw the gain over the base model at each budget: each seed a dot, mean and 95 % interval
    over seeds."""
    configs, name = result["configs"], names(result)
    note = "dots: seeds; bars: 95 % interval of their mean; filled: above 0, no run failed; "
    note += "hollow: all others, those below 0 too"
    # the page
    figure = new_figure(9.2, 1.65 + 0.36 * len(configs), "Gain over the base model", note)
    budgets, axes = judged_at(result), list[Axes]()
    n = len(budgets)
    grid = cells(figure, 1, n, left=margin(result, 8.5), top=0.95, bottom=0.6, wspace=0.06)
    # a panel for each budget, a row for each config
    for place, budget in enumerate(budgets):
        first = axes[0] if axes else None
        panel = figure.add_subplot(grid[0, place], sharex=first, sharey=first)
        axes.append(panel)
        plain_axes(panel, "x")
        panel.axvline(0, color=INK, linewidth=0.9)
        for row, config in enumerate(configs):
            _gain_row(panel, row, config, result, budget)
        limit = f"{result['budgets'][budget]:,.6g} {axis(result, budget)}"
        panel.set_title(f"{LETTERS[budget]} after {limit}", pad=7)
        points = ", percentage points" if units(result)[2] else ""
        panel.set_xlabel(f"gain in {result['settings']['score']} score{points}")
        panel.tick_params(axis="y", labelleft=panel is axes[0])
    # names at the left
    axes[0].set_yticks(
        range(len(configs)), [name[config["name"]] for config in configs], fontsize=8.5, color=INK
    )
    axes[0].set_ylim(len(configs) - 0.4, -0.6)
    return figure


def _gain_row(axes: Axes, row: int, config: Result, result: Result, budget: str) -> None:
    found, factor, base = config["summary"][budget], units(result)[0], result["base"]["score"]
    if found is None:
        axes.annotate(
            "no run got here",
            (0, row),
            (4, 0),
            textcoords="offset points",
            fontsize=7,
            color=BEST,
            va="center",
        )
        return
    # the seeds
    seeds = [
        factor * (run["at"][budget]["score"] - base) for run in config["seeds"] if run["at"][budget]
    ]
    axes.plot(
        seeds,
        [row + 0.27] * len(seeds),
        "o",
        color=OWN,
        alpha=0.45,
        markersize=3.4,
        markeredgewidth=0,
    )
    # their mean and its interval
    mean, low, high = (math.nan if value is None else factor * value for value in found["gain"])
    axes.plot([low, high], [row, row], color=OWN, linewidth=1.6, solid_capstyle="butt", zorder=3)
    face = OWN if found["beats_base"] else "white"
    axes.plot(
        [mean],
        [row],
        "D",
        color=OWN,
        markerfacecolor=face,
        markersize=5,
        markeredgewidth=1.2,
        zorder=4,
    )


@styled
def accuracy_figure(result: Result, x: str) -> Figure:
    """Draw held-out scores against `x` (NFE or seconds), one small panel per config over
    all others.

    The line is the mean over seeds at each mark, the band their range; axes are shared.
    """
    configs, factor, n = result["configs"], units(result)[0], len(result["configs"])
    curves = {config["name"]: mean_curve(config, result["base"], x) for config in configs}
    columns = min(4, n)
    rows = -(-n // columns)
    figure = new_figure(
        0.95 + 2.35 * max(columns, 2), 1.5 + 1.75 * rows, f"Held-out {score_name(result)}"
    )
    grid = cells(figure, rows, columns, left=0.62, top=1.12, bottom=0.55, hspace=0.32, wspace=0.1)
    # a panel for each config, all with the same axes
    panels: list[Axes] = []
    for index, config in enumerate(configs):
        first = panels[0] if panels else None
        axes = figure.add_subplot(
            grid[index // columns, index % columns], sharex=first, sharey=first
        )
        panels.append(axes)
        plain_axes(axes, "y")
        ticks(axes, y=5)
        axes.axhline(factor * result["base"]["score"], color=INK, linewidth=0.8, linestyle=DASHED)
        axes.axvline(result["budgets"][x], color=EDGE, linewidth=0.8, linestyle=":")
        _curve_panel(axes, config, curves, configs[0]["name"], factor)
        # its name, and the score at the budget
        found = config["summary"][x]
        axes.set_title(names(result)[config["name"]], fontsize=9, pad=4)
        axes.set_title(
            number(result, found["mean"]) if found else "",
            loc="right",
            fontsize=9,
            color=OWN,
            pad=4,
        )
        axes.tick_params(labelleft=index % columns == 0, labelbottom=index + columns >= n)
    # what the axes are
    figure.supxlabel(axis(result, x), fontsize=9, color=QUIET, y=0.13 / figure.get_figheight())
    figure.supylabel(score_name(result), fontsize=9, color=QUIET, x=0.1 / figure.get_figwidth())
    _curve_legend(figure, result, x)
    return figure


def _curve_panel(
    axes: Axes, config: Result, curves: dict[str, list[CurvePoint]], best: str, factor: float
) -> None:
    for name, points in curves.items():
        color, width, order = (BEST, 1.2, 1.95) if name == best else (OTHER, 0.8, 1.9)
        if name != config["name"]:
            axes.plot(*_line(points, factor), color=color, linewidth=width, zorder=order)
    mine = curves[config["name"]]
    low = [factor * p.low for p in mine]
    high = [factor * p.high for p in mine]
    axes.fill_between([p.x for p in mine], low, high, color=OWN, alpha=0.22, linewidth=0)
    axes.plot(*_line(mine, factor), color=OWN, linewidth=1.8, marker="o", markersize=3, zorder=2.1)


def _line(points: list[CurvePoint], factor: float) -> Line:
    x = np.array([p.x for p in points])
    return x, factor * np.array([p.mean for p in points])


def _curve_legend(figure: Figure, result: Result, x: str) -> None:
    best = labels([config["name"] for config in result["configs"]])[result["configs"][0]["name"]]
    entries = [
        Line2D([], [], color=OWN, linewidth=1.8, marker="o", markersize=3, label="mean of seeds"),
        Patch(facecolor=OWN, alpha=0.22, label="range of seeds"),
        Line2D([], [], color=BEST, linewidth=1.3, label=f"best at (a): {best}"),
        Line2D([], [], color=OTHER, linewidth=1, label="the others"),
        Line2D([], [], color=INK, linewidth=0.8, linestyle=DASHED, label="base model"),
        Line2D([], [], color=EDGE, linewidth=1, linestyle=":", label=f"budget {LETTERS[x]}"),
    ]
    legend(figure, entries if len(result["configs"]) > 1 else [*entries[:2], *entries[4:]])


@styled
def training_figure(result: Result) -> Figure:
    """Draw reward, ratio spread and diversity over network evaluations: a row per config, over all
    the others. What no run has, as losses without a ratio, has no column."""
    configs, name = result["configs"], names(result)
    shown = [key for key in TRACES if _has(configs, key)] or ["reward"]
    note = (
        "blue: the seeds of this config; grey: those of the others; at most 50 points a run, each "
        "a mean\n"
        "rewards: of all images that a method scores, previews and baselines too"
    )
    if "ratio_std" in shown:
        note += "; with one update the ratio is 1"
    figure = new_figure(9.4, 1.62 + 0.92 * len(configs), "Training", note)
    grid = cells(
        figure,
        len(configs),
        len(shown),
        left=margin(result, 8.5) + 0.4,
        top=1.12,
        bottom=0.5,
        hspace=0.16,
        wspace=0.2,
    )
    # a column for each metric, a row for each config
    for column, key in enumerate(shown):
        title, log = TRACES[key]
        traces = {}
        for config in configs:
            traces[config["name"]] = [_trace(run, key) for run in config["seeds"]]
        first: Axes | None = None
        for row, config in enumerate(configs):
            axes = figure.add_subplot(grid[row, column], sharex=first, sharey=first)
            first = first or axes
            _trace_panel(axes, traces, config["name"], log=log)
            axes.tick_params(labelbottom=row == len(configs) - 1)
            # titles above, names at the left
            if row == 0:
                axes.set_title(title, pad=6)
            if column == 0:
                axes.set_ylabel(
                    name[config["name"]],
                    rotation=0,
                    ha="right",
                    va="center",
                    fontsize=8.5,
                    color=INK,
                )
    figure.supxlabel(axis(result, "nfe"), fontsize=9, color=QUIET, y=0.13 / figure.get_figheight())
    return figure


def _has(configs: Sequence[Result], key: str) -> bool:
    """Say whether a run of the configs has a value of a metric."""
    lines = (_trace(run, key)[1] for config in configs for run in config["seeds"])
    return any(np.isfinite(line).any() for line in lines)


def _trace(run: Result, key: str) -> Line:
    """Return one metric of a run against network evaluations."""
    rows = run["trajectory"]
    return np.array(rows["nfe"], float), np.array(
        [math.nan if v is None else v for v in rows[key]], float
    )


def _trace_panel(axes: Axes, traces: dict[str, list[Line]], own: str, *, log: bool) -> None:
    plain_axes(axes, "y")
    # the others below, its own above
    for name, lines in traces.items():
        for line in lines if name != own else []:
            axes.plot(*line, color=OTHER, linewidth=0.5, zorder=1.9)
    for line in traces[own]:
        axes.plot(*line, color=OWN, linewidth=1.1, alpha=0.8, zorder=2.1)
    ticks(axes, y=3)
    # a logarithmic axis where there is something to show on it
    values = np.concatenate([y for lines in traces.values() for _, y in lines] or [np.zeros(0)])
    if log and not (values[np.isfinite(values)] > 0).any():
        axes.set_ylim(-0.05, 1)  # with one update an iteration the ratio never leaves 1
    elif log:
        axes.set_yscale("log", nonpositive="mask")
        low, high = np.log10(axes.get_ylim())
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1.0,) if high - low > 2 else (1.0, 3.0), numticks=4)
        )
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
