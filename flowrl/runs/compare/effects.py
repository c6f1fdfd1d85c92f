"""Effects of a factorial experiment, worked out from its result file alone.

Ordinary least squares on the cells' means. A main effect is the difference of a level to the first
level of its axis, averaged over all levels of the other axes; an interaction is a difference of two
such differences. Each is a weighted sum of cells' means, and its error has the parts of
`flowrl/evaluation/crossed_errors.py`: seeds, pooled over the cells, and prompts, shared by all
cells. Holm's correction goes over all effects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from flowrl.evaluation.crossed_errors import contrast_error, weights_of
from flowrl.runs.compare.design import model_matrix, term_row
from flowrl.runs.compare.outcomes import unpacked
from flowrl.runs.compare.summary import LEVEL, holm

Result = dict[str, Any]


class Contrast(NamedTuple):
    """One planned contrast."""

    name: str
    kind: str  # main or interaction
    row: np.ndarray  # of the model's terms


def contrasts(
    axes: Mapping[str, Mapping[str, Any]], pairs: Sequence[tuple[str, str]]
) -> list[Contrast]:
    """List the planned contrasts: each level against the first, alone and with the other axis."""

    def at(**levels: int) -> np.ndarray:
        return term_row(axes, pairs, levels)

    out = []
    # main effects: a level less the first one, over all levels of the other axes
    for axis, levels in axes.items():
        names = list(levels)
        for i, name in enumerate(names[1:], 1):
            row = at(**{axis: i}) - at(**{axis: 0})
            out.append(Contrast(f"{axis}: {name} - {names[0]}", "main", row))
    # interactions: what a level of one axis gains at a level of the other, beyond its own gain
    for a, b in pairs:
        for i, j in itertools.product(range(1, len(axes[a])), range(1, len(axes[b]))):
            row = at(**{a: i, b: j}) - at(**{a: 0, b: j}) - at(**{a: i, b: 0}) + at(**{a: 0, b: 0})
            name = f"{a}: {list(axes[a])[i]} x {b}: {list(axes[b])[j]}"
            out.append(Contrast(name, "interaction", row))
    return out


def analysed(result: Result) -> Result:
    """Return a result with its effects; without them as long as the runs cannot tell."""
    axes = result["design"]["axes"]
    pairs = [tuple(pair) for pair in result["design"]["interactions"]]
    # each cell's runs, [S, P]
    cells, groups = [], []
    for cell in result["cells"]:
        runs = [
            run
            for run in result["runs"]
            if run["cell"] == cell["name"] and run["score"] is not None
        ]
        if runs:
            levels = zip(axes, cell["levels"].values(), strict=True)
            cells.append(tuple(list(axes[axis]).index(level) for axis, level in levels))
            groups.append(np.array([_values(run) for run in runs]))
    # can the model be told yet?
    matrix = model_matrix(cells, axes, pairs)
    if not cells or np.linalg.matrix_rank(matrix) < matrix.shape[1]:
        return {**result, "effects": [], "fit": None}
    tags = _tags(result)
    weights = weights_of(tags)
    effects = []
    solve = np.linalg.pinv(matrix)
    means = np.array([group.mean(0) for group in groups])
    for contrast in contrasts(axes, pairs):
        factors = contrast.row @ solve
        effects.append(_effect(contrast, factors, groups, means, weights, tags))
    # one correction for all
    for effect, p in zip(effects, holm([_known(e["p"]) for e in effects]), strict=True):
        effect["p_holm"] = None if math.isnan(p) else p
    return {**result, "effects": effects, "fit": _fit(matrix, groups, weights)}


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _values(run: Result) -> list[float]:
    """Return a run's score per prompt, or the score alone where there are no outcomes."""
    if not run.get("outcomes"):
        return [run["score"]]
    return [sum(some) / len(some) for some in unpacked(run["outcomes"])]


def _tags(result: Result) -> list[str]:
    tags: list[str] = result.get("tags", [])
    return tags or ["all"]


def _effect(
    contrast: Contrast,
    factors: np.ndarray,
    groups: Sequence[np.ndarray],
    means: np.ndarray,
    weights: np.ndarray,
    tags: Sequence[str],
) -> Result:
    """Estimate a contrast, a sum of cells' means [C, P] with these factors [C]."""
    per_prompt = factors @ means
    share = sum(a * a / len(g) for a, g in zip(factors, groups, strict=True))
    error = contrast_error(groups, per_prompt, weights, tags, float(share))
    estimate, half = float(per_prompt @ weights), error.half()
    bounds = [estimate - half, estimate + half] if math.isfinite(half) else None
    p = error.p(estimate)
    return {
        "name": contrast.name,
        "kind": contrast.kind,
        "estimate": estimate,
        "interval": bounds,
        "freedom": error.freedom,
        "p": None if math.isnan(p) else p,
    }


def _fit(matrix: np.ndarray, groups: Sequence[np.ndarray], weights: np.ndarray) -> Result:
    """Say how well the model fits: the F test of what it leaves out, against the seeds' spread."""
    # groups: per cell the runs' scores [seeds, P]; weights [P] make one number of the prompts
    scores = [group @ weights for group in groups]
    counts = np.array([len(some) for some in scores], float)
    means = np.array([some.mean() for some in scores])
    # least squares on the cells' means, and what the model leaves of them
    fitted = matrix @ np.linalg.pinv(matrix) @ means
    left, free = float(counts @ (means - fitted) ** 2), len(means) - matrix.shape[1]
    # the yardstick: how far runs of one cell scatter over seeds
    squares = sum(float(((some - some.mean()) ** 2).sum()) for some in scores)
    pure = int(counts.sum()) - len(means)
    p = None
    if free > 0 and pure > 0 and squares > 0:
        p = float(stats.f.sf(left / free / (squares / pure), free, pure))
    return {
        "terms": matrix.shape[1],
        "cells": len(means),
        "spread_over_seeds": math.sqrt(squares / pure) if pure else None,
        "lack_of_fit_p": p,
    }


def effect_rows(result: Result) -> list[list[str]]:
    """Return the table of effects as texts, in points where scores are shares, largest first."""
    rows = [["effect", "points", "95 % interval", "p", "p after Holm"]]
    for effect in sorted(result["effects"], key=lambda effect: -abs(effect["estimate"])):
        span = effect["interval"]
        text = "" if span is None else f"{100 * span[0]:+.1f} to {100 * span[1]:+.1f}"
        ps = ["" if effect[key] is None else f"{effect[key]:.3f}" for key in ("p", "p_holm")]
        star = "*" if effect["p_holm"] is not None and effect["p_holm"] < LEVEL else ""
        rows.append([effect["name"], f"{100 * effect['estimate']:+.1f}", text, ps[0], ps[1] + star])
    return rows
