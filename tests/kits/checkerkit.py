"""The truth about a scene, known from its layout, beside which the shapes checker is measured.

Every scene is judged against three records: its own (true), another one of the same task drawn at
random, and its own with one word changed (a class, a count, a colour or a relation). The truth of
each pair comes from the layout by GenEval's rules, written here a second time and plainly. And
shapes painted by hand, judged as the embedded benchmark does.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.evaluation.suites.shapes.checker import check, judge_detections
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    RELATIONS,
    SIZE,
    Scenes,
    coverage,
    render,
)

Record = dict[str, Any]
KINDS = ("own", "random", "near")


def extent(scenes: Scenes, row: int, slot: int) -> tuple[float, float, float, float]:
    """Bound one shape of a layout: -> (left, top, right, bottom) in pixels."""
    x, y = scenes.center[row, slot]
    r = float(scenes.radius[row, slot])
    side = 0.88 * r if CLASSES[scenes.shape[row, slot]] == "square" else r
    base = 0.85 * r if CLASSES[scenes.shape[row, slot]] == "triangle" else side
    return float(x) - side, float(y) - side, float(x) + side, float(y) + base


def related(a: tuple[float, ...], b: tuple[float, ...], relation: str) -> bool:
    """Say whether box a stands in the relation to box b by GenEval's rule."""
    off = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    dims = [(a[i + 2] - a[i]) + (b[i + 2] - b[i]) for i in (0, 1)]
    shrunk = [
        float(np.sign(o)) * max(abs(o) - 0.1 * d, 0.0) for o, d in zip(off, dims, strict=True)
    ]
    if all(abs(s) < 1e-3 for s in shrunk):
        return False
    dx, dy = (s / math.hypot(*off) for s in shrunk)
    return {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}[
        relation
    ]


def truth(scenes: Scenes, row: int, record: Record) -> bool:
    """Judge the layout of one scene by GenEval's rules."""
    slots = range(int(scenes.number[row]))
    # entry by entry: enough objects of the class, all of the colour, all in the relation
    groups: list[list[int]] = []
    for entry in record["include"]:
        mine = [s for s in slots if CLASSES[scenes.shape[row, s]] == entry["class"]][
            : entry["count"]
        ]
        if len(mine) < entry["count"]:
            return False
        if "color" in entry and any(
            list(COLORS)[scenes.color[row, s]] != entry["color"] for s in mine
        ):
            return False
        # a position names an earlier entry, which every object has to be related to
        if "position" in entry:
            relation, reference = entry["position"]
            pairs = [(a, b) for a in mine for b in groups[reference]]
            if not all(
                related(extent(scenes, row, a), extent(scenes, row, b), relation) for a, b in pairs
            ):
                return False
        groups.append(mine)
    # nothing may be there more often than was asked for
    there = [CLASSES[scenes.shape[row, s]] for s in slots]
    counts = {c: there.count(c) for c in CLASSES}
    return all(counts[e["class"]] < e["count"] for e in record["exclude"])


def near_miss(record: Record, rng: np.random.Generator) -> Record:
    """Change one word of a record, and its exclusions with it; a changed relation may still be true
    of a scene."""
    # what to change: the count only where one kind of object is asked for
    new: Record = copy.deepcopy(record)
    entry = new["include"][int(rng.integers(len(new["include"])))]
    what = str(
        rng.choice(
            [key for key in entry if key != "count"] + ["count"] * (len(new["include"]) == 1)
        )
    )
    if what == "class":
        used = {e["class"] for e in new["include"]}
        entry["class"] = str(rng.choice([c for c in CLASSES if c not in used]))
    elif what == "count":
        entry["count"] = int(
            rng.choice(
                [n for n in (entry["count"] - 1, entry["count"] + 1) if 1 <= n <= MAX_OBJECTS]
            )
        )
    elif what == "color":
        entry["color"] = str(rng.choice([c for c in COLORS if c != entry["color"]]))
    else:
        entry["position"][0] = str(rng.choice([r for r in RELATIONS if r != entry["position"][0]]))
    # the exclusions follow from what is wanted now: one more of any class is wrong
    wanted = dict.fromkeys(CLASSES, 0)
    for one in new["include"]:
        wanted[one["class"]] += one["count"]
    new["exclude"] = [{"class": c, "count": n + 1} for c, n in wanted.items()]
    return new


def measure(task: str, *, scenes: int, seed: int) -> dict[str, float]:
    """Judge fresh scenes of a task against their own, a random and a near-miss record each -> the
    share of right verdicts and the number of false ones, by kind."""
    rng = np.random.default_rng([seed, TASKS.index(task)])
    pool = all_records()[task]
    own = [pool[i] for i in rng.integers(len(pool), size=scenes)]
    drawn = scenes_for(own, rng)
    others = [pool[i] for i in rng.integers(len(pool), size=len(own))]
    near = [near_miss(record, rng) for record in own]
    out: dict[str, float] = {}
    for kind, records in zip(KINDS, (own, others, near), strict=True):
        expected = np.array([truth(drawn, i, record) for i, record in enumerate(records)])
        got = check(render(drawn), records).strict.numpy()
        out[f"{kind}_agreement"] = float((got == expected).mean())
        out[f"{kind}_false_accepts"] = int((got & ~expected).sum())
    return out


RECORDS = all_records()
EVERY = [record for records in RECORDS.values() for record in records]
RGB = {name: np.array(rgb, np.float32) / 255 for name, rgb in COLORS.items()}
Y, X = np.mgrid[:SIZE, :SIZE] + np.float32(0.5)
WHOLE = np.ones((SIZE, SIZE), np.float32)


def mask(kind: str, x: float, y: float, r: float) -> np.ndarray:
    """Return the coverage [64, 64] of one shape."""
    place = np.array([[x, y]], np.float32)
    return coverage(np.array([CLASSES.index(kind)]), place, np.array([r], np.float32))[0]


def rounded(roundness: float, r: float) -> np.ndarray:
    """Draw a square of half side `r` with corners of radius `roundness * r`: 1 is a circle."""
    corner = roundness * r
    dx, dy = np.abs(X - 32) - r + corner, np.abs(Y - 32) - r + corner
    outside = np.hypot(np.maximum(dx, 0), np.maximum(dy, 0))
    inside = np.minimum(np.maximum(dx, dy), 0)
    return np.clip(0.5 - (outside + inside - corner), 0, 1)


def paint(*layers: tuple[np.ndarray, Any], background: float = 0.95) -> Tensor:
    """Paint masks [64, 64] in colours over each other -> [1, 3, 64, 64]."""
    image = np.full((SIZE, SIZE, 3), background, np.float32)
    for part, color in layers:
        rgb = RGB[color] if isinstance(color, str) else color
        image = image * (1 - part[..., None]) + part[..., None] * rgb
    return torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]


def record_of(shape: str, count: int = 1, color: str | None = None) -> dict[str, Any]:
    """Ask for `count` of one shape and for no other."""
    wanted = {"class": shape, "count": count} | ({"color": color} if color else {})
    exclude = [{"class": c, "count": (count if c == shape else 0) + 1} for c in CLASSES]
    return {"tag": "test", "include": [wanted], "exclude": exclude}


def against_all(image: Tensor) -> tuple[bool, float]:
    """Judge one image by every record of the benchmark: does it pass any, and its best grade."""
    found = detect(image, find_flaws=True)
    repeated = Detections(
        *(np.repeat(field, len(EVERY), 0) for field in found if field is not None)
    )
    verdict = judge_detections(repeated, EVERY)
    return bool(verdict.strict.any()), float(verdict.graded.max())


def grades(images: list[Tensor], record: dict[str, Any]) -> list[float]:
    """Grade several images by one record."""
    return check(torch.cat(images), [record] * len(images)).graded.tolist()
