"""What the figures of a comparison share: pages with a heading, plain axes, names and numbers as
text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flowrl.runs.compare.summary import Result, labels
from flowrl.runs.compare.tables import clock, units
from flowrl.runs.report.style import INK, PALETTE, QUIET, grid_along

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
