"""Does a model read the order of words? Count images as asked, the other way round, and neither.

Looked at are images with exactly the two shapes that the prompt names. A model that does not
read "left of" stands the two as asked as often as the other way round; one that does not know
which colour belongs to which shape swaps the colours as often as not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flowrl.evaluation.suites.shapes.checker import offsets
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, RELATIONS

ORDER_TASKS = ("position", "color_attr")
"""Tasks whose prompts mean something else with two words exchanged."""

_AXES = ((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))


class Order(NamedTuple):
    """Images with the two right shapes: as asked, opposite relation or swapped colours, else."""

    asked: int
    opposite: int
    neither: int


def word_order(images: Tensor, records: Sequence[Record], task: str) -> Order:
    """Count a task's images [N, 3, 64, 64] with exactly the two right shapes by their order."""
    # objects of the task's images
    rows = [i for i, record in enumerate(records) if record["tag"] == task]
    found, counts = detect(images[rows]), [0, 0, 0]
    for i, row in enumerate(rows):
        # the two right shapes
        entries = records[row]["include"]
        wanted = [CLASSES.index(entry["class"]) for entry in entries]
        shapes = found.shape[i, :2].tolist()
        if found.number[i] != 2 or sorted(shapes) != sorted(wanted):
            continue
        # their order
        slots = [shapes.index(shape) for shape in wanted]
        read = _order_of_places if task == "position" else _order_of_colors
        counts[read(found, i, slots, entries)] += 1
    return Order(*counts)


def _order_of_places(found: Detections, i: int, slots: list[int], entries: list[Record]) -> int:
    """Say of image i whether its objects stand as asked (0), the other way (1) or neither (2)."""
    first, second = slots
    right, down = _AXES[RELATIONS.index(entries[1]["position"][0])]
    offset = offsets(found.box[i, [second]], found.box[i, [first]])[0, 0]
    along = float(offset[0] * right + offset[1] * down)
    return 0 if along > 0.5 else 1 if along < -0.5 else 2


def _order_of_colors(found: Detections, i: int, slots: list[int], entries: list[Record]) -> int:
    """Say of image i whether its colours are as asked (0), swapped (1) or neither (2)."""
    seen = found.color[i, slots].tolist()
    asked = [list(COLORS).index(entry["color"]) for entry in entries]
    return 0 if seen == asked else 1 if seen == asked[::-1] else 2
