"""Scenes of one object that moves, as records and as pixels."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZE, FRAMES = 16, 5  # pixels of a side, frames of a video
SIDE, PACE = 5, 2  # pixels: of an object, and how far it moves per frame
BACKGROUND = (0.9, 0.9, 0.9)
COLORS = {
    "red": (0.85, 0.1, 0.1),
    "green": (0.1, 0.6, 0.15),
    "blue": (0.1, 0.2, 0.85),
    "yellow": (0.95, 0.75, 0.0),
}
CLASSES = ("square", "cross")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # rows, columns


class Scene(NamedTuple):
    """What a prompt asks for."""

    kind: str
    color: str
    direction: str

    @property
    def prompt(self) -> str:
        """Return the scene in words."""
        return f"a {self.color} {self.kind} moves {self.direction}"

    @property
    def record(self) -> dict[str, Any]:
        """Return the scene as a line of a prompt list."""
        asked = {"class": self.kind, "color": self.color, "direction": self.direction}
        return {"tag": self.direction, **asked, "prompt": self.prompt}


EVERY = [Scene(*parts) for parts in product(CLASSES, COLORS, DIRECTIONS)]
# one scene of each class and direction in turn of colours: every word is in every list
TEST = [s for i, s in enumerate(EVERY) if (i + i // 4) % 4 == 0]
VALIDATION = [s for i, s in enumerate(EVERY) if (i + i // 4) % 8 == 1]
TRAIN = [s for s in EVERY if s not in TEST and s not in VALIDATION]


def template(kind: str) -> Tensor:
    """Return an object's pixels, bool [SIDE, SIDE]; a cross has bars of one pixel."""
    whole = torch.ones(SIDE, SIDE, dtype=torch.bool)
    if kind == "square":
        return whole
    middle = (torch.arange(SIDE) - SIDE // 2).abs() < 1
    return middle[:, None] | middle[None, :]


def starts(direction: str, *, anywhere: bool = False) -> tuple[range, range]:
    """Return the rows and columns from which an object moves through the middle; `anywhere`: all
    from which it can move on for all frames."""
    reach, last = PACE * (FRAMES - 1), SIZE - SIDE
    found = []
    for sign in DIRECTIONS[direction]:
        low, high = reach * (sign < 0), last - reach * (sign > 0)
        if not anywhere:  # one place across, and two along, a pixel or two from the edge
            low, high = (last // 2, last // 2) if not sign else (low + 1, high - 1)
        found.append(range(low, high + 1))
    return found[0], found[1]


def paint(scene: Scene, row: int, column: int) -> Tensor:
    """Paint a video [FRAMES, 3, SIZE, SIZE] in [0, 1] whose object starts at a row and a column,
    those of its upper left corner."""
    video = torch.tensor(BACKGROUND)[None, :, None, None].repeat(FRAMES, 1, SIZE, SIZE)
    color, mask = torch.tensor(COLORS[scene.color])[:, None, None], template(scene.kind)
    down, along = (PACE * sign for sign in DIRECTIONS[scene.direction])
    for time, frame in enumerate(video):
        y, x = row + time * down, column + time * along
        part = frame[:, y : y + SIDE, x : x + SIDE]
        part.copy_(torch.where(mask, color, part))
    return video


def paint_video(scene: Scene, generator: torch.Generator, *, anywhere: bool = False) -> Tensor:
    """Paint a scene from one of its `starts` -> [FRAMES, 3, SIZE, SIZE]."""
    places = []
    for room in starts(scene.direction, anywhere=anywhere):
        places.append(int(torch.randint(room.start, room.stop, (), generator=generator)))
    return paint(scene, *places)
