"""The objects that a record of shapes asks for, as they are to be drawn, and layouts for records
that leave little room."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flowrl.evaluation.suites.shapes.checker import offsets
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    LARGEST,
    MAX_OBJECTS,
    RELATIONS,
    good_layouts,
)

AXIS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.float64)
"""Where each relation points."""
_MANY, _ROUNDS = 16, 800  # layouts to choose from, and draws after which there are no more


class Wanted(NamedTuple):
    """One object that a record asks for."""

    kind: int  # index into CLASSES
    color: int  # index into COLORS; -1 = any
    entry: int  # number of its include entry


class Planned(NamedTuple):
    """One object as it is, or as it is to be."""

    kind: int
    color: int
    x: float
    y: float
    radius: float


def wanted_of(record: dict[str, Any]) -> list[Wanted]:
    """List every object that a record asks for."""
    names, out = tuple(COLORS), []
    for number, entry in enumerate(record["include"]):
        color = names.index(entry["color"]) if "color" in entry else -1
        out += [Wanted(CLASSES.index(entry["class"]), color, number)] * int(entry["count"])
    return out


def relations_of(record: dict[str, Any]) -> list[tuple[int, int, int]]:
    """List relations as (entry, index into RELATIONS, entry that it refers to)."""
    out = []
    for number, entry in enumerate(record["include"]):
        if "position" in entry:
            relation, reference = entry["position"]
            out.append((number, RELATIONS.index(relation), int(reference)))
    return out


def objects_of(wanted: list[Wanted], entry: int) -> list[int]:
    """Return the places of an entry's objects."""
    return [w for w, one in enumerate(wanted) if one.entry == entry]


def related(wanted: list[Wanted], objects: list[Planned], record: dict[str, Any]) -> bool:
    """Say whether all relations of a record hold."""
    for number, relation, reference in relations_of(record):
        mine, theirs = objects_of(wanted, number), objects_of(wanted, reference)
        if not stand(objects, mine, theirs, relation):
            return False
    return True


def stand(objects: list[Planned], mine: list[int], theirs: list[int], relation: int) -> bool:
    """Say whether all of `mine` stand in a relation to all of `theirs`, with a margin."""
    boxes = np.array(
        [[o.x - o.radius, o.y - o.radius, o.x + o.radius, o.y + o.radius] for o in objects]
    )
    return bool((offsets(boxes[mine], boxes[theirs]) @ AXIS[relation] > 0.55).all())


def crowded(record: dict[str, Any]) -> bool:
    """Say whether a record asks for more than the benchmark's tasks do: a group in a relation, or
    more than four objects."""
    count = len(wanted_of(record))
    return count > MAX_OBJECTS or (count > 2 and bool(relations_of(record)))


def laid_out(objects: list[Planned], record: dict[str, Any]) -> list[Planned]:
    """Move all objects to the nearest of many layouts in which the record's relations hold and
    nothing overlaps; where none was found they stay as they are."""
    stands = []
    wanted = wanted_of(record)
    for number, relation, reference in relations_of(record):
        for a in objects_of(wanted, number):
            stands += [(0, a, b, relation) for b in objects_of(wanted, reference)]
    center, radius = _layouts(len(objects), tuple(stands))
    if not len(center):
        return objects
    # the least sum of squared ways
    here = np.array([(one.x, one.y) for one in objects])
    best = int(np.square(center - here).sum((1, 2)).argmin())
    moved = []
    for one, (x, y), r in zip(objects, center[best], radius[best], strict=True):
        moved.append(one._replace(x=float(x), y=float(y), radius=float(r)))
    return moved


@lru_cache(maxsize=64)
def _layouts(
    count: int, stands: tuple[tuple[int, int, int, int], ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw layouts -> centers [M, count, 2], radii [M, count], the same every time; none where
    they are too rare to be found."""
    center, radius = [np.zeros((0, count, 2))], [np.zeros((0, count))]
    rng = np.random.default_rng(0)
    for _ in range(_ROUNDS if count <= LARGEST else 0):
        more = good_layouts(rng, count, count, np.array(stands, np.int64).reshape(-1, 4))
        center.append(more[0])
        radius.append(more[1])
        if sum(map(len, center)) >= _MANY:
            break
    return np.concatenate(center), np.concatenate(radius)
