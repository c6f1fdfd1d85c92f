"""How much images differ where the prompt leaves things open: where a single object is, and which
colour it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.prompts import Record

OPEN = ("places", "colors")
"""What is measured: pixels, and a number of colours."""
OPEN_NOISE = 1000  # added to the seed, so that these images have noise of their own


def leaves_open(record: Record) -> bool:
    """Say whether a prompt asks for one object and names no colour."""
    include = record["include"]
    return len(include) == 1 and include[0]["count"] == 1 and "color" not in include[0]


def spread(images: Tensor) -> dict[str, float]:
    """Measure how much images [N, 3, H, W] of one prompt differ, of those that show one object.

    places: root mean square distance of the object from the mean place, in pixels. colors: the
    exponential of the entropy of the colours, the number of colours if all were as frequent; a
    colour that the checker cannot read is none. Returns {} where fewer than two images show one
    object of a readable colour.
    """
    found = detect(images)
    rows = np.flatnonzero((found.number == 1) & (found.color[:, 0] >= 0))
    if len(rows) < 2:
        return {}
    center = found.center[rows, 0]
    away = ((center - center.mean(0)) ** 2).sum(1)
    share = np.unique(found.color[rows, 0], return_counts=True)[1] / len(rows)
    return {
        "places": float(np.sqrt(away.mean())),
        "colors": float(np.exp(-(share * np.log(share)).sum())),
    }


def mean_spread(some: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average over prompts, leaving out those without a figure."""
    known = [one for one in some if one]
    if not known:
        return {}
    out = {}
    for key in OPEN:
        out[key] = float(np.mean([one[key] for one in known]))
    return out


def kept(found: Sequence[Mapping[str, float]], base: Mapping[str, float]) -> dict[str, Any]:
    """Return which share of the base model's spread runs keep, one per training seed: its mean, and
    a 95 % t interval over seeds, [None, None] for a single one; {} where nothing was measured."""
    known = [one for one in found if one]
    if not base or not known:
        return {}
    out: dict[str, Any] = {}
    for key in OPEN:
        shares = np.array([one[key] / base[key] for one in known])
        mean, interval = float(shares.mean()), [None, None]
        if len(shares) > 1:
            wide = stats.t.ppf(0.975, len(shares) - 1) * shares.std(ddof=1) / len(shares) ** 0.5
            interval = [mean - wide, mean + wide]
        out[key] = {"mean": mean, "interval": interval, "seeds": shares.tolist()}
    return out
