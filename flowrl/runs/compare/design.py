"""The design of a factorial experiment: axes, cells, and the linear model that they are to tell.

A design file names a config and axes; a level of an axis is a list of overrides. Not all cells of
the full product are run but a fraction of them, D-optimal for the wanted effects: of all choices of
as many cells one with the largest determinant of X'X, found by exchanging cells (Fedorov 1972) from
several random starts. For two-level axes and main effects this finds regular fractions.

Effects that are not named are taken to be zero. A fraction cannot tell them from the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from flowrl.core.errors import ConfigError
from flowrl.core.files import read_text

FEWEST = 32
"""Cells that a fraction must have; a smaller full product is run whole."""

_STARTS, _MOST = 8, 20_000
Levels = tuple[int, ...]


class Design(NamedTuple):
    """What is varied, and which cells are run."""

    base: str  # config
    overrides: tuple[str, ...]  # of every cell
    axes: dict[str, dict[str, list[str]]]  # axis: {level: overrides}; the first one is compared to
    interactions: tuple[tuple[str, str], ...]
    cells: tuple[Levels, ...]
    efficiency: float  # of the fraction, per cell, against the full product; at most 1

    def named(self, cell: Levels) -> dict[str, str]:
        """Return a cell as {axis: level}."""
        pairs = zip(self.axes.items(), cell, strict=True)
        return {axis: list(levels)[number] for (axis, levels), number in pairs}

    def changes(self, cell: Levels) -> list[str]:
        """Return the overrides of a cell."""
        changes = list(self.overrides)
        for axis, level in self.named(cell).items():
            changes += self.axes[axis][level]
        return changes


def load_design(path: Path) -> Design:
    """Read a design file and choose its cells. Raises ConfigError."""
    raw = _read(path)
    axes = _axes(raw["axes"], path)
    pairs = _pairs(raw.get("interactions", []), axes, path)
    # all cells that are allowed, and the best of them
    every = _allowed(axes, raw.get("exclude", []), path)
    number = min(_whole(raw.get("cells", FEWEST), 1, f"{path}: cells"), len(every))
    matrix = model_matrix(every, axes, pairs)
    if number < min(FEWEST, len(every)) or number < matrix.shape[1]:
        raise ConfigError(
            f"{path}: expected at least {max(min(FEWEST, len(every)), matrix.shape[1])} cells for "
            f"{matrix.shape[1]} terms and a product of {len(every)}; got {number}. Raise `cells`, "
            "or name fewer interactions."
        )
    chosen = d_optimal(matrix, number, _whole(raw.get("seed", 0), 0, f"{path}: seed"))
    if chosen is None:
        raise ConfigError(
            f"{path}: these effects cannot be told apart, whichever cells are run; name fewer "
            "interactions, or exclude less"
        )
    cells = tuple(every[i] for i in chosen)
    return Design(
        base=raw["base"],
        overrides=tuple(_overrides(raw.get("set", []), f"{path}: set")),
        axes=axes,
        interactions=pairs,
        cells=cells,
        efficiency=efficiency(matrix, chosen),
    )


def _read(path: Path) -> dict[str, Any]:
    """Read the keys of a design file, and its base."""
    # a date that is none is a ValueError of YAML's
    try:
        raw = yaml.safe_load(read_text(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as a design: {error}") from error
    known = {"base", "set", "axes", "interactions", "exclude", "cells", "seed"}
    if not isinstance(raw, dict) or set(raw) - known or not {"base", "axes"} <= set(raw):
        got = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise ConfigError(f"{path}: expected base, axes and some of {sorted(known)}; got {got}")
    if not isinstance(raw["base"], str):
        raise ConfigError(
            f"{path}: base: expected a config's name or file, as for flowrl train, got "
            f"{raw['base']!r}"
        )
    return raw


def _whole(value: Any, least: int, where: str) -> int:
    """Check a whole number."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{where}: expected a whole number >= {least}, got {value!r}")
    return value


def _overrides(value: Any, where: str) -> list[str]:
    """Check a list of overrides."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConfigError(
            f"{where}: expected a list of overrides such as [optimizer.lr=1e-4], got {value!r}"
        )
    return value


def _axes(raw: Any, path: Path) -> dict[str, dict[str, list[str]]]:
    """Check the axes: two levels each, and more; each a list of overrides."""
    axes: dict[str, dict[str, list[str]]] = {}
    for axis, levels in raw.items() if isinstance(raw, dict) else ():
        if not isinstance(levels, dict) or len(levels) < 2:
            raise ConfigError(f"{path}: axis {axis!r}: expected two levels or more, got {levels!r}")
        axes[str(axis)] = {}
        for level, changes in levels.items():
            where = f"{path}: {axis}, {level}"
            axes[str(axis)][str(level)] = _overrides(changes, where)
    if not axes:
        raise ConfigError(f"{path}: expected axes, each {{level: [overrides]}}, got {raw!r}")
    return axes


def _pairs(raw: Any, axes: Mapping[str, Any], path: Path) -> tuple[tuple[str, str], ...]:
    """Check the interactions: pairs of axes, or "all"."""
    if raw == "all":
        return tuple(itertools.combinations(axes, 2))
    pairs = []
    for pair in raw if isinstance(raw, list) else [raw]:
        names = list(map(str, pair)) if isinstance(pair, list) else []
        if len(names) != 2 or len(set(names)) < 2 or set(names) - set(axes):
            raise ConfigError(
                f"{path}: interactions: expected a list of pairs of {sorted(axes)}, or all; got "
                f"{pair!r}"
            )
        pairs.append((names[0], names[1]))
    return tuple(pairs)


def _allowed(axes: Mapping[str, Any], exclude: Any, path: Path) -> list[Levels]:
    """List the cells of the full product but for those that match an entry of `exclude`."""
    sizes = [len(levels) for levels in axes.values()]
    if np.prod(sizes) > _MOST:
        raise ConfigError(f"{path}: the product has {np.prod(sizes)} cells, more than {_MOST}")
    # entries as numbers of levels
    banned = []
    for entry in exclude if isinstance(exclude, list) else [exclude]:
        if not isinstance(exclude, list) or not isinstance(entry, dict) or not entry:
            raise ConfigError(
                f"{path}: exclude: expected a list of {{axis: level}}, each with one or more, got "
                f"{entry!r}"
            )
        unknown = [a for a, level in entry.items() if a not in axes or str(level) not in axes[a]]
        if unknown:
            raise ConfigError(f"{path}: exclude: no such axis or level in {entry}: {unknown}")
        places = {list(axes).index(a): list(axes[a]).index(str(v)) for a, v in entry.items()}
        banned.append(places)
    every = list(itertools.product(*(range(size) for size in sizes)))
    kept = []
    for cell in every:
        levels = set(enumerate(cell))
        if not any(places.items() <= levels for places in banned):
            kept.append(cell)
    if not kept:
        raise ConfigError(f"{path}: exclude leaves none of {len(every)} cells; exclude less")
    return kept


def _codes(number: int) -> np.ndarray:
    """Return effect codes [levels, levels - 1]: the last level is minus the sum of the others."""
    return np.vstack([np.eye(number - 1), -np.ones(number - 1)])


def model_matrix(
    cells: Sequence[Levels], axes: Mapping[str, Any], pairs: Sequence[tuple[str, str]]
) -> np.ndarray:
    """Return X [cells, terms]: a constant, main effects, and interactions, in effect codes."""
    rows = [term_row(axes, pairs, dict(zip(axes, cell, strict=True))) for cell in cells]
    return np.array(rows).reshape(len(cells), -1)


def term_row(
    axes: Mapping[str, Any], pairs: Sequence[tuple[str, str]], levels: Mapping[str, int]
) -> np.ndarray:
    """Return the row of X for some axes at these levels, the mean over all levels of the others."""
    codes = {}
    for axis, names in axes.items():
        table = _codes(len(names))
        codes[axis] = table[levels[axis]] if axis in levels else np.zeros(len(names) - 1)
    parts = [np.ones(1), *codes.values()]
    parts += [np.outer(codes[a], codes[b]).ravel() for a, b in pairs]
    return np.concatenate(parts)


def d_optimal(matrix: np.ndarray, number: int, seed: int) -> list[int] | None:
    """Choose rows of X [N, p] with a large determinant of X'X -> their sorted numbers.

    None if no choice has full rank. All rows, if as many are wanted.
    """
    if number >= len(matrix):
        whole = list(range(len(matrix)))
        return whole if np.linalg.matrix_rank(matrix) == matrix.shape[1] else None
    rng = np.random.default_rng(seed)
    best, most = None, -np.inf
    for _ in range(_STARTS):
        chosen = _exchanged(matrix, rng.permutation(len(matrix))[:number])
        sign, size = np.linalg.slogdet(matrix[chosen].T @ matrix[chosen])
        if sign > 0 and size > most + 1e-9 and np.isfinite(size):
            best, most = sorted(chosen.tolist()), size
    full = best is not None and np.linalg.matrix_rank(matrix[best]) == matrix.shape[1]
    return best if full else None


def _exchanged(matrix: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Replace each chosen row by the one that raises the determinant most, until none does."""
    chosen, p = chosen.copy(), matrix.shape[1]
    ridge = 1e-6 * np.eye(p)  # lets a start of too low a rank climb
    for _ in range(50):
        changed = False
        for place in range(len(chosen)):
            # without row i, det grows by 1 + x' M^-1 x with row x
            rest = np.delete(chosen, place)
            inverse = np.linalg.inv(matrix[rest].T @ matrix[rest] + ridge)
            gain = np.einsum("np,pq,nq->n", matrix, inverse, matrix)
            gain[rest] = -np.inf  # each cell once
            new = int(gain.argmax())
            if gain[new] > gain[chosen[place]] * (1 + 1e-9):
                chosen[place], changed = new, True
        if not changed:
            break
    return chosen


def efficiency(matrix: np.ndarray, chosen: Sequence[int]) -> float:
    """Return the D-efficiency per cell against all rows: (det ratio) ^ (1 / terms)."""
    p, some = matrix.shape[1], matrix[list(chosen)]
    part = np.linalg.slogdet(some.T @ some / len(some))[1]
    whole = np.linalg.slogdet(matrix.T @ matrix / len(matrix))[1]
    return float(np.exp((part - whole) / p))
