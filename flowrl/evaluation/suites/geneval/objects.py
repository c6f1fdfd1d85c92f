"""What a detector found on an image, and what of it GenEval looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Box = tuple[float, float, float, float]


class DetectedObject(NamedTuple):
    """One detected object."""

    box: Box  # left, top, right, bottom in pixels, y down
    score: float  # confidence in [0, 1]
    mask: np.ndarray | None = None  # [H, W] bool; None = the detector gives boxes only
    color: str | None = None  # where the detector says it itself, "" = unreadable; None = ask CLIP


Objects = dict[str, list[DetectedObject]]
"""Class -> its objects, the most confident first; a class without any is not there."""

Colors = Callable[[str, list[DetectedObject]], list[str]]
"""(class, objects) -> the colour of each."""


class DetectionLimits(NamedTuple):
    """Which detections count; the defaults are GenEval's for its Mask2Former."""

    threshold: float = 0.3  # confidence above which an object counts
    counting: float = 0.9  # the same, for the task `counting`
    most: int = 16  # objects of a class, the most confident ones
    overlap: float = 1.0  # IoU from which the less confident of two is dropped; 1 = never


def kept(found: Mapping[str, list[DetectedObject]], tag: str, limits: DetectionLimits) -> Objects:
    """Return the detections that count for a task, sorted by confidence.

    GenEval, evaluate_images.py: strictly above the threshold, then the most confident 16, then
    greedy suppression if it is on. Which of equally confident ones come first is what numpy's
    `argsort` of float32 says, read from its end, as in the published code.
    """
    least = np.float32(limits.counting if tag == "counting" else limits.threshold)
    out: Objects = {}
    for name, objects in found.items():
        scores = np.array([one.score for one in objects], dtype=np.float32)
        order = np.argsort(scores)[::-1]
        rest = [objects[place] for place in order[scores[order] > least][: limits.most]]
        mine: list[DetectedObject] = []
        for candidate in rest:
            most = max((iou(candidate.box, other.box) for other in mine), default=-1.0)
            if limits.overlap >= 1 or most < limits.overlap:
                mine.append(candidate)
        if mine:
            out[name] = mine
    return out


def iou(a: Box, b: Box) -> float:
    """Return the overlap of two boxes; both ends of a box are inside of it, as in GenEval's
    code."""
    shared = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    whole = _area(a) + _area(b) - shared
    return shared / whole if whole else 0.0


def _area(box: Box) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)
