"""The two figures of docs/results.md, drawn from assets/results/methods.json by `tables.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, wrapped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from methods import NFE, ROOT
from methods_table import PAGE, STEPS, curve, ended_runs, found, slopes, untrained
from pictures import Numbers, Picture

from flowrl.runs.report.style import INK, PALETTE, grid_along, styled

FOLDER = ROOT / "assets" / "figures"
CHART, CURVES = FOLDER / "methods-cost.png", FOLDER / "methods-curves.png"
BEST = 3  # trained configs of the chart
COLORED = 6  # configs whose curves have a colour
BLOCKS = 6  # parts of the budget over which a curve is averaged
OTHER = "#c8c8c8"
Result = dict[str, Any]


# ---------------------------------------------------------------------------------------- the chart


def chart_numbers(result: Result, rows: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return the points of the chart in percent: [evaluations, right, low, high]."""
    trained = {}
    for best in rows[:BEST]:
        ends = (best["right"] + side * best["half"] for side in (-1, 1))
        trained[short(best)] = [STEPS, 100 * best["right"], *(100 * end for end in ends)]
    return {"base": base_numbers(result), "trained": trained}


def base_numbers(result: Result) -> dict[str, list[list[float | None]]]:
    """Return the base model's points as lines: with guidance, with more steps, the best of n."""
    groups: dict[str, list[list[float | None]]] = {}
    plain: list[float | None] = []
    for row in untrained(result):
        low, high = (None if end is None else 100 * end for end in row["interval"])
        point = [row["nfe_per_image"], 100 * row["right"], low, high]
        if row["title"] == "as it is":
            plain = point
        else:
            groups.setdefault(_group(row["title"]), []).append(point)
    lines = {name: sorted([plain, *some], key=_cost) for name, some in groups.items()}
    return lines or {"base model": [plain]}


def _cost(point: Sequence[float | None]) -> float:
    """Sort by evaluations."""
    return point[0] or 0.0


def _group(title: str) -> str:
    """Say which line of the chart an alternative belongs to."""
    if title.startswith("best of"):
        return "base model, best of n"
    return "base model, guidance" if "guidance" in title else "base model, more steps"


def short(row: Mapping[str, Any]) -> str:
    """Return a config's name without its folder."""
    return str(row["config"]).rpartition("/")[2]


@styled
def draw_chart(numbers: Numbers) -> Figure:
    """Draw right images against evaluations per image, with the intervals of the tables."""
    figure = Figure(figsize=(7.0, 3.7))
    axes = figure.add_subplot()
    grid_along(axes)
    colors = iter(PALETTE)
    for i, (name, points) in enumerate(numbers["trained"].items()):
        shift = 1.045 ** (i - (len(numbers["trained"]) - 1) / 2)  # equal costs stand side by side
        _bars(axes, [points], next(colors), shift, marker="D", label=f"trained: {name}")
    shades = ("#222222", "#7a7a7a", "#a9a9a9")
    for i, ((name, points), shade) in enumerate(zip(numbers["base"].items(), shades, strict=False)):
        _bars(axes, points, shade, 1.02 ** (i - 1), marker="os^"[i], ls="-", label=name)
    axes.set_xscale("log")
    ticks = sorted({int(p[0]) for some in numbers["base"].values() for p in some} | {STEPS})
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("network evaluations for an image (with guidance two a step)")
    axes.set_ylabel("right images, %")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.8)
    figure.tight_layout()
    return figure


def _bars(
    axes: Axes, points: Sequence[Sequence[float | None]], color: str, shift: float, **look: Any
) -> None:
    """Draw points with their intervals; those that have none stand alone."""
    x = [shift * (point[0] or 0.0) for point in points]
    y = np.array([point[1] for point in points], float)
    low = np.array([point[2] for point in points], float)
    high = np.array([point[3] for point in points], float)
    sides = np.nan_to_num(np.stack([y - low, high - y]))
    look = {"ls": "none", "ms": 5, "lw": 1.2, "elinewidth": 1.1, "capsize": 2.5, **look}
    axes.errorbar(x, y, sides, color=color, **look)


# --------------------------------------------------------------------------------------- the curves


def curve_numbers(result: Result, rows: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return how far right training images rose, [evaluations, points] at each sixth of the
    budget, of the configs whose noise stays where it is; and all gains, [gain, low, high] in
    points."""
    entries = {entry["file"]: entry for entry in result["configs"]}
    curves = {}
    for row in rows:
        entry = entries[row["config"]]
        if slopes(entry):
            curves[short(row)] = rise_of(entry)
    gains = {}
    for row in rows:
        ends = (row["gain"] + side * row["half"] for side in (-1, 1))
        gains[short(row)] = [100 * row["gain"], *(100 * end for end in ends)]
    return {"curves": curves, "gains": gains}


def rise_of(entry: Mapping[str, Any]) -> list[list[float]]:
    """Average the points of all seeds' curves over each sixth of the budget, above where the mean
    of their straight lines begins."""
    some = [curve(run, "accuracy") for run in ended_runs(entry)]
    some = [(x, y) for x, y in some if len(x)]
    x, y = (np.concatenate(parts) for parts in zip(*some, strict=True))
    start = float(np.mean([one_y.mean() for _, one_y in some]))
    middle = float(np.mean([one_x.mean() for one_x, _ in some]))
    start -= float(np.mean(slopes(entry))) * middle
    made = []
    for i in range(BLOCKS):
        mine = (x > NFE * i / BLOCKS) & ((x <= NFE * (i + 1) / BLOCKS) | (i == BLOCKS - 1))
        if mine.any():
            made.append([float(x[mine].mean()), 100 * float(y[mine].mean() - start)])
    return made


@styled
def draw_curves(numbers: Numbers) -> Figure:
    """Draw the curves of training at the left, and the gains with their intervals at the right."""
    gains, curves = numbers["gains"], numbers["curves"]
    figure = Figure(figsize=(8.6, max(3.4, 0.9 + 0.19 * len(gains))))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    colors = dict(zip(gains, PALETTE[:COLORED], strict=False))
    # training
    grid_along(left)
    left.axhline(0, color=INK, lw=0.8)
    for name in [*gains][::-1]:  # the best ones above
        if name in curves:
            x, y = zip(*curves[name], strict=True)
            color, best = colors.get(name, OTHER), name in colors
            look = {"lw": 1.6, "marker": "o", "ms": 3} if best else {"lw": 0.8}
            left.plot(np.array(x) / 1000, y, color=color, **look)
    left.set_xlabel("thousand network evaluations")
    left.set_ylabel("rise of right training images, points")
    left.set_xlim(left=0)
    # what was gained on the prompts of the table
    grid_along(right, "x")
    right.axvline(0, color=INK, lw=0.8)
    for row, (name, (gain, low, high)) in enumerate(gains.items()):
        color = colors.get(name, "#8a8a8a")
        if None not in (low, high):
            right.plot([low, high], [row, row], color=color, lw=1.6, solid_capstyle="butt")
        right.plot([gain], [row], "D", color=color, ms=4.5)
    right.set_yticks(range(len(gains)), list(gains), fontsize=8, color=INK)
    right.set_ylim(len(gains) - 0.5, -0.5)
    right.set_xlabel("gain on the table's prompts, points, 95 % interval")
    figure.tight_layout()
    return figure


# ------------------------------------------------------------------------------------ for the docs


def page(text: str) -> str:
    """Set both figures in docs/results.md, each with its caption."""
    if not found()[1]:
        return between(text, "methods: figures", "methods: figures end", [])
    cost = wrapped(
        "Right images against what an image costs: the base model, and the best trained configs, "
        "whose bars are those of their gains."
    )
    learnt = wrapped(
        "Left: right training images over the training, of the configs whose noise stays where it "
        "is. Right: the gains of the table, in the same colours."
    )
    parts = [f"![Right images against cost](../{CHART.relative_to(ROOT)})", cost]
    parts += [f"![Curves and gains](../{CURVES.relative_to(ROOT)})", learnt]
    return between(text, "methods: figures", "methods: figures end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that shows the figures."""
    return [(PAGE, page)]


def pictures() -> list[Picture]:
    """Return both figures; none where nothing was trained yet."""
    result, rows = found()
    if not rows:
        return []
    return [
        Picture(CHART, chart_numbers(result, rows), draw_chart),
        Picture(CURVES, curve_numbers(result, rows), draw_curves),
    ]
