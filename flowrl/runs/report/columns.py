"""The logs of a run as columns of numbers, and fewer of them for a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.errors import DataError, RunError
from flowrl.runs.folder import number_or_nan

MOST = 300  # points of a curve


class Series(NamedTuple):
    """One curve; NaN where nothing was measured."""

    x: np.ndarray  # [N] iterations
    y: np.ndarray  # [N]


def series(rows: Iterable[Mapping[str, Any]], key: str) -> Series:
    """Return one number of every row; NaN where a row lacks it. Raises RunError for a text."""
    x, y = [], []
    for row in rows:
        x.append(row["iteration"])
        try:
            y.append(number_or_nan(row.get(key), f"iteration {row['iteration']}, {key}"))
        except DataError as error:
            raise RunError(str(error)) from error
    return Series(np.array(x, float), np.array(y, float))


def thinned(line: Series, most: int = MOST) -> Series:
    """Return a curve of at most `most` points: the means of so many equal stretches of it."""
    if len(line.x) <= most:
        return line
    x, y = [], []
    parts = zip(np.array_split(line.x, most), np.array_split(line.y, most), strict=True)
    for places, values in parts:
        known = values[np.isfinite(values)]
        x.append(places.mean())
        y.append(known.mean() if len(known) else np.nan)
    return Series(np.array(x), np.array(y))


def json_numbers(values: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON has them: six digits, null for what is not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
