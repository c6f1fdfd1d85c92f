"""A small detector of shapes that knows nothing of the checker: the network, and its verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, RELATIONS

CELL = 4
"""Pixels along the side of a cell; an object belongs to the cell of its centre."""

ODD = len(CLASSES)
"""Class of what is on an image and is none of the shapes, or in none of the colours."""

WEIGHTS = Path("assets/shapes-judge/model.safetensors")
_AXES = torch.tensor([(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0)])


class Judge(nn.Module):
    """Five convolutions: images [N, 3, 64, 64] -> [N, 14, 16, 16] per cell: is an object's centre
    here, 5 classes, 6 colours, 2 offsets."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = ((3, 16, 2, 1), (16, 32, 2, 1), (32, width, 1, 1), (width, width, 1, 2))
        layers: list[nn.Module] = []
        for before, after, stride, dilation in (*sizes, (width, width, 1, 1)):
            layers.append(nn.Conv2d(before, after, 3, stride, dilation, dilation))
            layers += [nn.GroupNorm(8, after), nn.SiLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Conv2d(width, 1 + ODD + 1 + len(COLORS) + 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return what each cell says."""
        out: Tensor = self.head(self.body(2 * images - 1))
        return out


class Thing(NamedTuple):
    """One object that the judge sees."""

    shape: int  # index into CLASSES, or ODD
    color: int  # index into COLORS
    center: Tensor  # [2] (x, y) in pixels


def load_judge(path: Path = WEIGHTS) -> Judge:
    """Load the judge's weights. Raises ModelError where there are none."""
    if not path.exists():
        raise ModelError(
            f"{path}: expected the judge's weights; make them with "
            "python scripts/assets/shapes_judge/train_judge.py"
        )
    judge = Judge()
    judge.load_state_dict(load_file(path))
    return judge.eval()


@torch.no_grad()
def things_on(judge: Judge, images: Tensor) -> list[list[Thing]]:
    """List the objects of each image [N, 3, 64, 64] in [0, 1]."""
    found = []
    for some in images.split(256):
        cells = judge(some.float())
        # a centre is where its neighbours are less sure
        sure = cells[:, 0]
        peak = (sure > 0) & (sure == nn.functional.max_pool2d(sure, 5, 1, 2))
        for i in range(len(some)):
            places = peak[i].nonzero().tolist()
            found.append([_thing(cells[i, :, y, x], x, y) for y, x in places])
    return found


def _thing(cell: Tensor, x: int, y: int) -> Thing:
    classes, colors = cell[1 : 2 + ODD], cell[2 + ODD : -2]
    center = CELL * (torch.tensor([float(x), float(y)]) + cell[-2:].sigmoid())
    return Thing(int(classes.argmax()), int(colors.argmax()), center)


def is_right(things: Sequence[Thing], record: Record) -> bool:
    """Say whether exactly what a record asks for is there, and nothing else.

    Relations are read off the centres: within 60 degrees of the asked direction.
    """
    # as many of each class, and nothing odd
    wanted: Counter[int] = Counter()
    for entry in record["include"]:
        wanted[CLASSES.index(entry["class"])] += entry["count"]
    if Counter(thing.shape for thing in things) != wanted:
        return False
    # of the asked colours
    groups: list[list[Thing]] = []
    twice = len(wanted) < len(record["include"])
    for entry in record["include"]:
        mine = [thing for thing in things if thing.shape == CLASSES.index(entry["class"])]
        if "color" in entry:
            color = list(COLORS).index(entry["color"])
            colored = [thing for thing in mine if thing.color == color]
            mine = colored if twice or len(colored) == len(mine) else []
        if len(mine) != entry["count"]:
            return False
        groups.append(mine)
    return all(stand_as_asked(groups, i, entry) for i, entry in enumerate(record["include"]))


def stand_as_asked(groups: list[list[Thing]], i: int, entry: dict[str, Any]) -> bool:
    """Say whether the objects of an entry stand as it asks to those of its reference."""
    if "position" not in entry:
        return True
    relation, reference = entry["position"]
    axis = _AXES[RELATIONS.index(relation)]
    for a in groups[i]:
        for b in groups[reference]:
            offset = a.center - b.center
            if float(offset @ axis) <= 0.5 * float(offset.norm()):
                return False
    return True
