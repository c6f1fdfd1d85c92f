"""Draw a comparison from its result file: what was gained, and the held-out curves."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowrl.runs.compare.summary import LETTERS, Result, judged_at, labels, mean_curve
from flowrl.runs.compare.tables import units
from flowrl.runs.report.style import EDGE, INK, PALETTE, grid_along, styled

OWN, BEST, OTHER = PALETTE[0], PALETTE[1], "#d4d4d4"
DASHED = (0, (4, 3))


def names(result: Result) -> dict[str, str]:
    """Return the configs' short names, with the number of runs that failed."""
    found = labels([config["name"] for config in result["configs"]])
    for config in result["configs"]:
        failed = sum(run["failed"] is not None for run in config["seeds"])
        if failed:
            found[config["name"]] += f" ({failed} failed)"
    return found


def axis(budget: str) -> str:
    """Name what a budget counts."""
    return "network evaluations" if budget == "nfe" else "seconds of training"


@styled
def gains_figure(result: Result) -> Figure:
    """Draw the gain over the base model at each budget: each seed a dot, mean and 95 % interval
    over seeds."""
    configs, budgets = result["configs"], judged_at(result)
    figure = Figure(figsize=(9.2, 1.3 + 0.36 * len(configs)), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharex=True, sharey=True, squeeze=False)[0]
    for axes, budget in zip(panels, budgets, strict=True):
        grid_along(axes, "x")
        axes.axvline(0, color=INK, linewidth=0.9)
        for row, config in enumerate(configs):
            _gain_row(axes, row, config, result, budget)
        limit = f"{result['budgets'][budget]:,.6g} {axis(budget)}"
        axes.set_title(f"{LETTERS[budget]} after {limit}")
        points = ", percentage points" if units(result)[2] else ""
        axes.set_xlabel(f"gain in {result['settings']['score']} score{points}")
    panels[0].set_yticks(range(len(configs)), list(names(result).values()), color=INK)
    panels[0].set_ylim(len(configs) - 0.4, -0.6)
    figure.suptitle(
        "Gain over the base model. Dots: seeds; bars: 95 % interval of their mean; filled: above 0",
        fontsize=8,
        color=INK,
    )
    return figure


def _gain_row(axes: Axes, row: int, config: Result, result: Result, budget: str) -> None:
    found, factor, base = config["summary"][budget], units(result)[0], result["base"]["score"]
    if found is None:
        axes.text(0, row, "no run got here", fontsize=7, color=BEST, va="center")
        return
    # the seeds
    for run in config["seeds"]:
        if run["at"][budget]:
            gain = factor * (run["at"][budget]["score"] - base)
            axes.plot(gain, row + 0.27, "o", color=OWN, alpha=0.45, markersize=3.4)
    # their mean and its interval
    mean, low, high = (math.nan if value is None else factor * value for value in found["gain"])
    axes.plot([low, high], [row, row], color=OWN, linewidth=1.6, zorder=3)
    face = OWN if found["beats_base"] else "white"
    axes.plot(mean, row, "D", color=OWN, markerfacecolor=face, markersize=5, zorder=4)


@styled
def accuracy_figure(result: Result, x: str) -> Figure:
    """Draw held-out scores against `x` (NFE or seconds), one small panel per config over
    all others.

    The line is the mean over seeds at each mark, the band their range; axes are shared.
    """
    configs, (factor, digits, unit) = result["configs"], units(result)
    curves = {config["name"]: mean_curve(config, result["base"], x) for config in configs}
    columns = min(4, len(configs))
    rows = -(-len(configs) // columns)
    size = (0.95 + 2.35 * max(columns, 2), 1.2 + 1.75 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, config in zip(panels, configs, strict=False):
        grid_along(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.axhline(factor * result["base"]["score"], color=INK, linewidth=0.8, linestyle=DASHED)
        axes.axvline(result["budgets"][x], color=EDGE, linewidth=0.8, linestyle=":")
        # the others, the best of them in a colour of its own
        for name, some in curves.items():
            if name != config["name"]:
                color = BEST if name == configs[0]["name"] else OTHER
                means = [factor * point.mean for point in some]
                axes.plot([point.x for point in some], means, color=color, linewidth=0.9)
        # its own
        mine = curves[config["name"]]
        at = [point.x for point in mine]
        low = [factor * point.low for point in mine]
        high = [factor * point.high for point in mine]
        axes.fill_between(at, low, high, color=OWN, alpha=0.22, linewidth=0)
        axes.plot(at, [factor * point.mean for point in mine], color=OWN, marker="o", markersize=3)
        # its name, and the score at the budget
        found = config["summary"][x]
        axes.set_title(names(result)[config["name"]])
        score = f"{factor * found['mean']:.{digits}f}" if found else ""
        axes.set_title(score, loc="right", color=OWN)
    for axes in panels[len(configs) :]:
        axes.remove()
    figure.supxlabel(axis(x), fontsize=9)
    figure.supylabel(f"held-out {result['settings']['score']} score{unit}", fontsize=9)
    figure.suptitle(
        "Blue: mean and range of seeds; orange: the best config; dashed: the base model; dotted: "
        "the budget",
        fontsize=8,
        color=INK,
    )
    return figure
