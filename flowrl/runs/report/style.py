"""The look of all figures: figures.mplstyle, its colours by name, and how a figure is written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from flowrl.core.files import replacing

FILE = Path(__file__).with_name("figures.mplstyle")
_RC = matplotlib.rc_params_from_file(FILE, use_default_template=False)
PALETTE: tuple[str, ...] = tuple(map(to_hex, _RC["axes.prop_cycle"].by_key()["color"]))
INK = to_hex(_RC["axes.titlecolor"])
QUIET = to_hex(_RC["axes.labelcolor"])
EDGE = to_hex(_RC["axes.edgecolor"])

styled = style.context(FILE)
"""Decorate a function that draws a figure."""


def grid_along(axes: Axes, direction: Literal["x", "y"] = "y") -> None:
    """Leave the grid lines of one direction; to be called while the style holds.

    matplotlib makes ticks when a figure is written, by the style of that moment. The first ones are
    made here, and all later ones are their copies.
    """
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_ticks(1)
    axes.grid(False)
    axes.grid(True, axis=direction)


def save_figure(figure: Figure, file: Path, *, dpi: int) -> None:
    """Write a figure as PNG, whole or not at all. Raises RunError."""
    with replacing(file) as draft:
        figure.savefig(draft, format="png", dpi=dpi)
