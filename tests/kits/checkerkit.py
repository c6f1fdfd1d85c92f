"""The truth about a scene, known from its layout, beside which the shapes checker is measured.

Every scene is judged against three records: its own (true), another one of the same task drawn at
random, and its own with one word changed (a class, a count, a colour or a relation). The truth of
each pair comes from the layout by GenEval's rules, written here a second time and plainly.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    RELATIONS,
    Scenes,
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
