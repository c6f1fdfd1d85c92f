"""T2I-CompBench's score of where two things stand (2307.06350; Karine-Huang/T2I-CompBench,
UniDet_eval/2D_spatial_eval.py).

Compared with the published function on 100,000 random pairs of boxes and all relations: equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from flowrl.evaluation.suites.geneval.objects import Box, DetectedObject

SIDE = 479  # pixels of an image's short side, as the published detector sees it ...
MOST = 480  # ... unless its long side would have more
NEAR = 150  # pixels of that image within which things are beside each other
OVERLAP = 0.1  # IoU from which a place counts less
_WAY = {"left": (0, 1), "right": (0, -1), "top": (1, 1), "bottom": (1, -1)}


def holds(kind: str, a: Box, b: Box) -> float:
    """Return how well box `a` stands to box `b` as asked, in [0, 1]; boxes are in the published
    detector's pixels, y down.

    Beside: 1 within NEAR along either axis, else NEAR over the larger offset. The others: the
    offset of the centres has the right sign and its axis is the longer one, then 1, or OVERLAP /
    IoU where the boxes overlap more.
    """
    offset = [(b[i] + b[i + 2] - a[i] - a[i + 2]) / 2 for i in (0, 1)]
    if kind == "beside":
        if min(map(abs, offset)) < NEAR:
            return 1.0
        return NEAR / max(map(abs, offset))
    if kind not in _WAY:
        return 0.0
    axis, sign = _WAY[kind]
    if sign * offset[axis] <= 0 or abs(offset[axis]) <= abs(offset[1 - axis]):
        return 0.0
    shared = _overlap(a, b)
    return 1.0 if shared < OVERLAP else OVERLAP / shared


def _overlap(a: Box, b: Box) -> float:
    """Return the IoU; an edge is no pixel of its own here, unlike in GenEval."""
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    whole = sum(areas) - width * height
    return width * height / whole if whole > 0 else 0.0


def place_score(
    kind: str,
    first: Sequence[DetectedObject],
    second: Sequence[DetectedObject],
    size: tuple[int, int],
) -> float:
    """Score the most confident object of each kind on an image of `size` (width, height).

    A quarter for the confidence of each, a half for their relation; a sum below a half is 0. So
    one thing alone, or a relation that does not hold, is worth nothing.
    """
    score = sum(0.25 * found[0].score for found in (first, second) if found)
    if first and second:
        score += holds(kind, scaled(first[0].box, size), scaled(second[0].box, size)) / 2
    return score if score >= 0.5 else 0.0


def twin_score(
    kind: str, found: Sequence[DetectedObject], size: tuple[int, int]
) -> tuple[float, list[list[DetectedObject]]]:
    """Score two objects of one class as `place_score` does: of all ordered pairs of different
    objects the best -> its score, and the pair. One object alone stands to nothing."""
    best, chosen = place_score(kind, found[:1], [], size), [list(found[:1]), list[DetectedObject]()]
    for one, other in itertools.permutations(found, 2):
        score = place_score(kind, [one], [other], size)
        if score > best or not chosen[1]:
            best, chosen = max(best, score), [[one], [other]]
    return best, chosen


def scaled(box: Box, size: tuple[int, int]) -> Box:
    """Return a box of an image of `size` (width, height) in the published detector's pixels."""
    ratio = min(SIDE / min(size), MOST / max(size))
    left, top, right, bottom = (edge * ratio for edge in box)
    return left, top, right, bottom
