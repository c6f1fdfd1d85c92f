"""MMHM: several measures of one setting as one number, which none of them can hide in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from flowrl.core.errors import DataError

EPS = 1e-3
Bounds = dict[str, tuple[float, float]]


def bounds_of(values: Mapping[str, Sequence[float]]) -> Bounds:
    """Return the lowest and the highest value of each measure over the settings compared."""
    return {name: (min(column), max(column)) for name, column in values.items()}


def mmhm(
    values: Mapping[str, Sequence[float]],
    *,
    lower: Collection[str] = ("fid",),
    bounds: Bounds | None = None,
    eps: float = EPS,
    unclipped_bounds: bool = False,
) -> list[float]:
    """Return the min-max harmonic mean of each setting from {measure: one value per setting}.

    u = (x - min) / (max - min), turned round for measures of `lower`, 1 where all are equal; then
    K / sum_k 1 / (eps + u_k), up to 1 + eps. `bounds` are those of an earlier comparison. A measure
    at its worst keeps the score below about K eps, so of few settings almost all score nothing:
    compare at least five. **Differs:** the published code lets u leave [0, 1] with bounds of
    earlier settings, and then a setting worse than all of these can come first; here u is clipped,
    and `unclipped_bounds` is theirs. Raises DataError for columns that differ in length, bounds
    that lack a measure, and numbers that are not finite.
    """
    _check_finite(values, "setting")
    lengths = {len(column) for column in values.values()}
    if len(lengths) != 1 or not eps > 0:
        raise DataError(
            f"mmhm: expected measures with one value for each setting and eps > 0, got "
            f"{ {name: len(column) for name, column in values.items()} } and {eps}"
        )
    # best and worst of each measure: among these settings, or of an earlier comparison
    limits = bounds or bounds_of(values)
    missing = [name for name in values if name not in limits]
    if missing:
        raise DataError(f"mmhm: the bounds have no {', '.join(missing)}, only {', '.join(limits)}")
    _check_finite({name: limits[name] for name in values}, "bound")
    columns = []
    # u [settings] of each measure, 1 the best
    for name, column in values.items():
        shares = [_share(x, limits[name], name in lower) for x in column]
        if not unclipped_bounds:
            shares = [min(max(u, 0.0), 1.0) for u in shares]
        columns.append(shares)
    # harmonic: one bad measure weighs more than several good ones
    means = []
    for row in zip(*columns, strict=True):
        means.append(len(columns) / sum(1 / (eps + u) for u in row))
    return means


def _check_finite(rows: Mapping[str, Sequence[float]], what: str) -> None:
    """Refuse NaN and infinity, against which nothing is larger or smaller. Raises DataError."""
    for name, row in rows.items():
        for place, value in enumerate(row):
            if not math.isfinite(value):
                raise DataError(
                    f"mmhm: {name}, {what} {place + 1} of {len(row)}: expected a finite number, "
                    f"got {value}; leave this measure out, or measure again what has none"
                )


def _share(value: float, bounds: tuple[float, float], lower: bool) -> float:
    low, high = bounds
    if low == high:
        return 1.0
    return ((high - value) if lower else (value - low)) / (high - low)
