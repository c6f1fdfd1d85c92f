"""Videos of one object that moves: the scenes, and an exact checker that sees nothing but
pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from flowrl.core.errors import DataError

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

NEAR = 0.45  # of a colour, as a distance in RGB: what is farther from all of them is of none
CLUTTER = 4  # pixels of a frame that may be of another colour, or of none
OVERLAP = 0.75  # intersection over union with the object where it fits best
SLACK = 1  # pixels that a frame's move may be off, along the way and across


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


class VideoVerdict(NamedTuple):
    """What is right of videos [L] of T frames."""

    looks: Tensor  # [L, T] bool  one object of the right class and colour, and nothing else
    moves: Tensor  # [L, T - 1] bool  the object of the right colour moved as told

    @property
    def right(self) -> Tensor:
        """Return [L] bool: every frame and every move."""
        return self.looks.all(1) & self.moves.all(1)

    @property
    def graded(self) -> Tensor:
        """Return [L] in [0, 1]: the share of right frames and that of right moves, averaged."""
        return (self.looks.float().mean(1) + self.moves.float().mean(1)) / 2


def check_videos(videos: Tensor, records: Sequence[Mapping[str, Any]]) -> VideoVerdict:
    """Check videos [L, T, 3, H, W] in [0, 1] against their records. Raises DataError."""
    if videos.ndim != 5 or videos.shape[2] != 3 or videos.shape[1] < 2:
        raise DataError(f"expected videos [L, T, 3, H, W] of 2 frames and more, got {videos.shape}")
    looks, moves = [], []
    for video, record in zip(videos.float(), records, strict=True):
        color = list(COLORS).index(record["color"])
        label = _labels(video)
        mine = label == color
        others = ((label != color) & (label != len(COLORS))).flatten(1).sum(1)
        fit, place = _fits(mine, record["class"])
        found = mine.flatten(1).sum(1) > SIDE
        looks.append((fit >= OVERLAP) & (others <= CLUTTER))
        moves.append(_as_told(place, record["direction"]) & found[1:] & found[:-1])
    return VideoVerdict(torch.stack(looks), torch.stack(moves))


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Raise DataError unless a record asks for a scene of these."""
    for key, known in (("class", CLASSES), ("color", COLORS), ("direction", DIRECTIONS)):
        if record.get(key) not in known:
            raise DataError(
                f"{where}: {key}: expected one of {', '.join(known)}, got {record.get(key)!r}; use "
                "a list of assets/moving"
            )


def _labels(video: Tensor) -> Tensor:
    """Name each pixel's colour -> [T, H, W]: the place in COLORS, then background, then none."""
    palette = torch.tensor([*COLORS.values(), BACKGROUND], device=video.device)
    far = (video[:, None] - palette[None, :, :, None, None]).square().sum(2).sqrt()
    distance, label = far.min(1)
    return torch.where(distance < NEAR, label, len(palette))


def _fits(mine: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Fit the object into each frame's pixels [T, H, W] -> the best intersection over union [T],
    and the centre of the pixels [T, 2] in rows and columns.

    The object of another class must not fit better: then it is 0.
    """
    count = mine.flatten(1).sum(1)
    best = {}
    for name in CLASSES:
        shape = template(name).to(mine.device).float()
        both = conv2d(mine[:, None].float(), shape[None, None]).flatten(1).amax(1)
        best[name] = both / (count + shape.sum() - both)
    other = torch.stack([fit for name, fit in best.items() if name != kind]).amax(0)
    rows, columns = (torch.arange(n, device=mine.device).float() for n in mine.shape[1:])
    weight = count.clamp_min(1)
    centre = [(mine.sum(2) * rows).sum(1) / weight, (mine.sum(1) * columns).sum(1) / weight]
    return torch.where(best[kind] > other, best[kind], 0.0), torch.stack(centre, 1)


def _as_told(place: Tensor, direction: str) -> Tensor:
    """Say of places [T, 2] which moves are as told [T - 1]."""
    wanted = PACE * torch.tensor(DIRECTIONS[direction], device=place.device)
    return ((place.diff(dim=0) - wanted).abs() <= SLACK).all(1)
