"""The right image nearest to an image of coloured shapes, which the checker reads.

The objects that a record asks for are placed where the image has them, or laid out anew where a
record leaves little room.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.evaluation.suites.shapes.checker import judge_detections, offsets
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    LARGEST,
    MAX_OBJECTS,
    RELATIONS,
    SIZE,
    coverage,
    good_layouts,
)

_RGB = np.array(list(COLORS.values()), np.float32) / 255.0
_REACH = (1.0, 0.88, 1.0, 1.0)  # half the width of each class in units of its radius
_SMALL, _LARGE = 7.0, 13.0  # radii that are kept as they are
_EDGE, _GAP = 2.0, 4.0  # pixels to the image's edge and between shapes, as in rendered scenes
_MOST = 5  # objects up to which every assignment is tried: 120

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


def nearest_right(images: Tensor, records: list[dict[str, Any]]) -> Tensor:
    """Draw a right image near each [N, 3, 64, 64] -> the same shape, float32. The same image and
    record always give the same one. Raises DataError for other sizes.

    Shapes move as little as they have to. Where a record is crowded, that may leave some of them no
    place; then all of them move, to the nearest of many layouts in which the record is right.
    """
    found = detect(images)
    drawn = np.empty(tuple(images.shape), np.float32)
    plans: list[list[Planned]] = []
    # rendered backgrounds are light greys
    greys = [float(np.clip(found.background[i].mean(), 0.88, 1.0)) for i in range(len(records))]
    for i, record in enumerate(records):
        plans.append(_corrected(wanted_of(record), record, found, i))
        drawn[i] = _drawn(plans[i], greys[i])
    # the crowded ones have to prove that they are right
    doubted = [i for i, record in enumerate(records) if crowded(record)]
    if doubted:
        looked = detect(torch.from_numpy(drawn[doubted]), find_flaws=True)
        right = judge_detections(looked, [records[i] for i in doubted]).strict.tolist()
        for i, fine in zip(doubted, right, strict=True):
            if not fine:
                drawn[i] = _drawn(laid_out(plans[i], records[i]), greys[i])
    return torch.from_numpy(drawn)


def _corrected(
    wanted: list[Wanted], record: dict[str, Any], found: Detections, i: int
) -> list[Planned]:
    """Turn what is on image i into what is asked for."""
    number = int(found.number[i])
    price = _prices(wanted, found, i, number)
    # the cheapest way that keeps the relations, else the cheapest
    best = None
    for way in _ways(price):
        objects = _placed(wanted, way, found, i)
        if related(wanted, objects, record):
            return objects
        best = best or objects
    assert best is not None
    return _moved(wanted, best, record)


def _prices(wanted: list[Wanted], found: Detections, i: int, number: int) -> np.ndarray:
    """Return what it costs to make object j of image i the wanted w -> [W, K + W]; the last W
    columns draw it in a free place instead."""
    price = np.full((len(wanted), number + len(wanted)), 1.5)
    for w, one in enumerate(wanted):
        match, tint = found.match[i, :number, one.kind], found.tint[i, :number]
        shade = tint.max(1) if one.color < 0 else tint[:, one.color]
        price[w, :number] = (1 - match) + (1 - shade)
        # tiny specks are no objects yet
        price[w, :number] += np.clip(1 - found.area[i, :number] / 60, 0, 1)
    return price


def _ways(price: np.ndarray) -> list[tuple[int, ...]]:
    """List ways to give each of W wanted objects one of K + W columns, the cheapest first."""
    count, columns = price.shape
    number = columns - count
    # what is there, as far as it is close to anything that is wanted
    order = np.argsort(price[:, :number].min(0), kind="stable")[: max(count, _MOST)]
    slots = [*sorted(order.tolist())[:_MOST], *range(number, columns)][: _MOST + count]
    if count > 4:  # too many to try all of them
        return [_greedy(price)]
    tried: dict[tuple[int, ...], float] = {}
    for way in permutations(slots, count):
        # free places are alike
        same = tuple(j if j < number else -1 for j in way)
        tried[same] = float(sum(price[w, j] for w, j in enumerate(way)))
    return sorted(tried, key=lambda way: (tried[way], way))


def _greedy(price: np.ndarray) -> tuple[int, ...]:
    """Give each wanted object the cheapest column that is left."""
    number, way = price.shape[1] - len(price), [-1] * len(price)
    taken: set[int] = set()
    for flat in np.argsort(price[:, :number], axis=None, kind="stable").tolist():
        w, j = divmod(flat, max(number, 1))
        if way[w] < 0 and j not in taken and price[w, j] < 1.5:
            way[w] = j
            taken.add(j)
    return tuple(way)


def _placed(wanted: list[Wanted], way: tuple[int, ...], found: Detections, i: int) -> list[Planned]:
    """Make the wanted objects where the given ones are, the others in free places."""
    made: dict[int, Planned] = {}
    for w, j in enumerate(way):
        if j >= 0:
            made[w] = _kept(wanted[w], found, i, j)
    for w, j in enumerate(way):
        if j < 0:
            x, y = _free([*made.values()])
            color = max(wanted[w].color, 0)
            made[w] = Planned(wanted[w].kind, color, x, y, 9.0)
    return [made[w] for w in range(len(wanted))]


def _kept(one: Wanted, found: Detections, i: int, j: int) -> Planned:
    """Leave object j of image i in its place, as the wanted kind."""
    left, top, right, bottom = found.box[i, j].tolist()
    kind = int(found.shape[i, j])
    reach, color = 1.0, one.color
    if kind >= 0:
        reach = _REACH[kind]
    if color < 0:
        color = int(found.tint[i, j].argmax())
    radius = float(np.clip((right - left) / 2 / reach, _SMALL, _LARGE))
    x, y = (left + right) / 2, (top + bottom) / 2
    if kind == 2:  # a triangle's box is lower than its middle
        y = bottom - 0.85 * radius
    low, high = radius + _EDGE, SIZE - radius - _EDGE
    return Planned(
        one.kind, color, float(np.clip(x, low, high)), float(np.clip(y, low, high)), radius
    )


def _free(others: list[Planned]) -> tuple[float, float]:
    """Find the place that is farthest from other objects; without any the middle."""
    if not others:
        return SIZE / 2, SIZE / 2
    grid = np.arange(11.0, SIZE - 10, 3.0)
    x, y = map(np.ravel, np.meshgrid(grid, grid))
    room = [np.hypot(x - one.x, y - one.y) - one.radius for one in others]
    best = int(np.min(room, axis=0).argmax())
    return float(x[best]), float(y[best])


def _moved(wanted: list[Wanted], objects: list[Planned], record: dict[str, Any]) -> list[Planned]:
    """Move objects of entries with a relation to the nearest place where it holds, entry after
    entry."""
    out = [*objects]
    for number, relation, reference in relations_of(record):
        for w in objects_of(wanted, number):
            theirs = objects_of(wanted, reference)
            there = _to_relation(out, w, theirs, relation)
            if there is None and len(theirs) == 1:
                # it stands on that edge: both move
                x, y = SIZE / 2 - 13 * AXIS[relation]
                out[theirs[0]] = out[theirs[0]]._replace(x=float(x), y=float(y))
                there = _to_relation(out, w, theirs, relation)
            out[w] = there or out[w]
    return out


def _to_relation(
    objects: list[Planned], w: int, theirs: list[int], relation: int
) -> Planned | None:
    """Return object w in the nearest place that is free and has the relation; None = nowhere."""
    one = objects[w]
    grid = np.arange(one.radius + _EDGE, SIZE - one.radius - _EDGE + 1e-6, 2.0)
    places = [*product(grid.tolist(), repeat=2)]
    places.sort(key=lambda at: (at[0] - one.x) ** 2 + (at[1] - one.y) ** 2)
    others = [other for k, other in enumerate(objects) if k != w]
    for x, y in places:
        there = one._replace(x=x, y=y)
        if not _apart(there, others):
            continue
        if stand([*objects[:w], there, *objects[w + 1 :]], [w], theirs, relation):
            return there
    return None


def _apart(one: Planned, others: list[Planned]) -> bool:
    for other in others:
        if np.hypot(one.x - other.x, one.y - other.y) - one.radius - other.radius < _GAP:
            return False
    return True


def _drawn(objects: list[Planned], grey: float) -> np.ndarray:
    """Draw objects on a grey background -> [3, 64, 64] float32."""
    kind = np.array([one.kind for one in objects])
    center = np.array([(one.x, one.y) for one in objects], np.float32)
    radius = np.array([one.radius for one in objects], np.float32)
    image = np.full((3, SIZE, SIZE), grey, np.float32)
    for mask, one in zip(coverage(kind, center, radius), objects, strict=True):
        image = image * (1 - mask) + _RGB[one.color][:, None, None] * mask
    return image
