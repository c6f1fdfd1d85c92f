"""Objects of the shapes benchmark in GenEval's form, so that its rules can judge them too."""

from __future__ import annotations

from torch import Tensor

from flowrl.evaluation.suites.geneval.objects import DetectedObject, Objects
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS

_COLORS = tuple(COLORS)


def shapes_objects(images: Tensor) -> list[Objects]:
    """Find the readable shapes of images [N, 3, 64, 64] in [0, 1], each with its colour."""
    return objects_of(detect(images))


def objects_of(found: Detections) -> list[Objects]:
    """Return the detections of N images; what has no readable shape is left out."""
    out: list[Objects] = []
    for i, number in enumerate(found.number.tolist()):
        mine: Objects = {}
        for k in range(number):
            shape, color = int(found.shape[i, k]), int(found.color[i, k])
            if shape < 0:
                continue
            left, top, right, bottom = found.box[i, k].tolist()
            named = _COLORS[color] if color >= 0 else ""
            one = DetectedObject(
                (left, top, right, bottom), float(found.confidence[i, k]), None, named
            )
            mine.setdefault(CLASSES[shape], []).append(one)
        out.append(mine)
    return out
