"""The figure of docs/hacking.md: proxy and truth over training, drawn from
assets/results/hacking.json by `tables.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, wrapped
from hacking import EARLY, NFE, NOTHING, PAGE, ROLLBACK, ROOT, ROWS, complete, read
from matplotlib.figure import Figure
from pictures import Numbers, Picture

from flowrl.runs.report.style import INK, PALETTE, grid_along, styled

FILE = ROOT / "assets" / "figures" / "hacking.png"
SIDES = {"head": "proxy: the head, %", "strict": "truth: right images, %"}
Result = Mapping[str, Any]


def numbers(result: Result) -> Numbers:
    """Return the mean over seeds at every evaluation on validation prompts, row by row: [network
    evaluations, proxy, truth], the latter in percent."""
    judged = result.get("judged", {})
    found = {}
    for name in complete(result):
        if name != EARLY:
            curves = [_curve(result, name, seed) for seed in judged[name]]
            found[name] = _mean([curve for curve in curves if curve])
    # all begin at the base model, which the run that goes back judges, too
    start = [row[0] for row in _rolled_back(result) if row[0][0] == 0]
    return {"base": start[:1], "rows": {name: rows for name, rows in found.items() if rows}}


def _curve(result: Result, name: str, seed: str) -> list[list[float]]:
    """Return the evaluations of one run after training began."""
    if name == ROLLBACK:
        row = result["judged"][name][seed]
        each = NFE / max(row["iteration"], 1)
        return [_point(one, each * one["iteration"]) for one in row["curve"] if one["iteration"]]
    for entry in result["configs"]:
        for run in entry["seeds"] if entry["name"] == f"hacking-{name}" else ():
            if str(run["seed"]) == seed:
                return [_point(one, one["nfe"]) for one in run["curve"]]
    return []


def _rolled_back(result: Result) -> list[list[list[float]]]:
    """Return the curves of the runs that go back, with what stands before training."""
    curves = []
    for run in result.get("judged", {}).get(ROLLBACK, {}).values():
        curves.append([_point(one, float(one["iteration"])) for one in run["curve"]])
    return curves


def _point(row: Result, nfe: float) -> list[float]:
    return [nfe, *(100 * row["rewards"][side] for side in SIDES)]


def _mean(curves: Sequence[list[list[float]]]) -> list[list[float]]:
    """Average runs point by point, as far as all of them go."""
    if not curves:
        return []
    common = min(map(len, curves))
    mean: list[list[float]] = np.mean([curve[:common] for curve in curves], 0).tolist()
    return mean


@styled
def draw(shown: Numbers) -> Figure:
    """Draw the proxy at the left, the truth at the right, a line for each row."""
    figure = Figure(figsize=(8.6, 3.6))
    panels = figure.subplots(1, 2)
    colors = dict(zip(shown["rows"], (INK, *PALETTE, *PALETTE), strict=False))
    for place, (axes, label) in enumerate(zip(panels, SIDES.values(), strict=True), start=1):
        grid_along(axes)
        for row, (name, points) in enumerate(shown["rows"].items()):
            x, y = zip(*((one[0], one[place]) for one in [*shown["base"], *points]), strict=True)
            width = 2.4 if name == NOTHING else 1.4
            dashes = "-" if row <= len(PALETTE) else "--"
            look = {"color": colors[name], "lw": width, "ls": dashes, "marker": "o", "ms": 3}
            axes.plot(np.array(x) / 1000, y, label=ROWS[name].title.replace("`", ""), **look)
        axes.set_xlabel("thousand network evaluations")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.8, fontsize=8)
    figure.tight_layout(w_pad=2.5)
    return figure


def page(text: str) -> str:
    """Set the figure in docs/hacking.md, with its caption; nothing where nothing was trained."""
    if not complete(read()):
        return between(text, "hacking: figure", "hacking: figure end", [])
    caption = wrapped(
        "Proxy and truth on validation prompts over training, means over the seeds; the base model "
        "stands at 0."
    )
    parts = [f"![Proxy and truth over training](../{FILE.relative_to(ROOT)})", caption]
    return between(text, "hacking: figure", "hacking: figure end", parts)


def targets() -> list[tuple[Path, Any]]:
    """Return the page that shows the figure."""
    return [(PAGE, page)]


def pictures() -> list[Picture]:
    """Return the figure; none where nothing was trained yet."""
    result = read()
    return [Picture(FILE, numbers(result), draw)] if complete(result) else []
