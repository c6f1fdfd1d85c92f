"""Draw the effects of a factorial experiment."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flowrl.runs.compare.panels import OTHER, OWN, cells, legend, new_figure, plain_axes
from flowrl.runs.compare.summary import LEVEL
from flowrl.runs.report.style import INK, styled


@styled
def effects_figure(result: dict[str, Any]) -> Figure:
    """Draw every effect with its interval, main effects above, each kind by its size."""
    ranked = sorted(result["effects"], key=lambda e: (e["kind"] != "main", -abs(e["estimate"])))
    figure = new_figure(8.6, 1.45 + 0.27 * len(ranked), "Effects")
    wide = 0.4 + 0.075 * max(len(effect["name"]) for effect in ranked)
    axes = figure.add_subplot(cells(figure, 1, 1, left=wide, top=0.75, bottom=0.5)[0, 0])
    plain_axes(axes, "x")
    axes.axvline(0, color=INK, linewidth=0.9)
    # a row each
    for row, effect in enumerate(ranked):
        sure = effect["p_holm"] is not None and effect["p_holm"] < LEVEL
        color = OWN if sure else "#8a8a8a"
        if effect["interval"] is not None:
            ends = [100 * end for end in effect["interval"]]
            axes.plot(ends, [row, row], color=color, linewidth=1.5, solid_capstyle="butt")
        face = color if sure else "white"
        axes.plot(100 * effect["estimate"], row, "D", color=color, markerfacecolor=face, ms=4.5)
    # what stands where
    mains = sum(effect["kind"] == "main" for effect in ranked)
    if mains < len(ranked):
        axes.axhline(mains - 0.5, color=OTHER, linewidth=1)
    axes.set_yticks(range(len(ranked)), [e["name"] for e in ranked], fontsize=8, color=INK)
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    axes.set_xlabel(f"difference in {result['score']} score, percentage points")
    # the key, of the marks that are there
    sure = {e["p_holm"] is not None and e["p_holm"] < LEVEL for e in ranked}
    entries = []
    if True in sure:
        entries.append(Line2D([], [], color=OWN, marker="D", ms=4.5, label=f"p < {LEVEL}, Holm"))
    if False in sure:
        mark = Line2D([], [], color="#8a8a8a", marker="D", ms=4.5, label=f"p >= {LEVEL}, Holm")
        mark.set_markerfacecolor("white")
        entries.append(mark)
    legend(figure, entries)
    return figure
