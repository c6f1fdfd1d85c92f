"""Render scenes of coloured shapes: 64x64 RGB, plain background, one to six anti-aliased shapes,
no overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIZE = 64
"""Side of an image in pixels."""

CLASSES = ("circle", "square", "triangle", "cross")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 165, 65),
    "blue": (40, 85, 225),
    "yellow": (245, 205, 30),
    "purple": (150, 50, 185),
    "black": (30, 30, 30),
}
RELATIONS = ("left of", "right of", "above", "below")
MAX_OBJECTS = 4
"""Objects that the benchmark's prompts ask for at most; those of the harder tier ask for six."""

Standing = tuple[int, int, int]
"""Slot a, slot b and the index of the relation in which a stands to b."""

_RGB = np.array(list(COLORS.values()), dtype=np.float32) / 255.0
_RADIUS = {1: (9.0, 13.0), 2: (9.0, 12.0), 3: (8.0, 10.5), 4: (8.0, 10.0)}
_RADIUS |= {5: (7.0, 8.0), 6: (6.5, 7.5)}
LARGEST = max(_RADIUS)
"""Objects that a scene can have at most."""

_MARGIN = 2.0  # pixels between a shape and the image's edge
_TRIES = 4096  # scenes that are drawn at once where good ones are rare
_GAP = 4.0  # pixels between two shapes' circumscribed circles


class Scenes(NamedTuple):
    """N scenes of up to K objects, K at least 4; slots past ``number`` are unused. Lengths in
    pixels, y down."""

    number: np.ndarray  # [N] int64, 1..K
    shape: np.ndarray  # [N, K] int64, index into CLASSES
    color: np.ndarray  # [N, K] int64, index into COLORS
    center: np.ndarray  # [N, K, 2] float32, (x, y)
    radius: np.ndarray  # [N, K] float32
    background: np.ndarray  # [N] float32 grey level in [0, 1]


def coverage(
    shape: np.ndarray, center: np.ndarray, radius: np.ndarray, size: int = SIZE
) -> np.ndarray:
    """Anti-aliased mask of each shape: [M] ids, [M, 2], [M] -> [M, size, size] in [0, 1].

    One pixel of soft edge along the signed distance. A circle fills its radius; square, triangle
    and cross are inscribed in the same box so that their areas are alike.
    """
    grid = np.arange(size, dtype=np.float32) + 0.5
    x = (grid[None, None, :] - center[:, 0, None, None]).astype(np.float32)
    y = (grid[None, :, None] - center[:, 1, None, None]).astype(np.float32)
    r = radius[:, None, None].astype(np.float32)
    out = np.empty((len(shape), size, size), dtype=np.float32)
    for index, distance in enumerate((_circle, _square, _triangle, _cross)):
        rows = np.flatnonzero(shape == index)
        if len(rows):
            out[rows] = np.clip(0.5 - distance(x[rows], y[rows], r[rows]), 0.0, 1.0)
    return out


def _circle(x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.sqrt(x * x + y * y) - r


def _box(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x) - a, np.abs(y) - b)


def _square(x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    return _box(x, y, 0.88 * r, 0.88 * r)


def _triangle(x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    base, height, half = 0.85 * r, 1.85 * r, r
    slope = np.sqrt(height * height + half * half)
    # edge from the apex (0, base - height)
    side = (np.abs(x) * height - (y - base + height) * half) / slope
    return np.maximum(side, y - base)


def _cross(x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    return np.minimum(_box(x, y, r, 0.34 * r), _box(x, y, 0.34 * r, r))


def render(scenes: Scenes, size: int = SIZE) -> Tensor:
    """Draw scenes: -> [N, 3, size, size] float32 in [0, 1]."""
    n = len(scenes.number)
    grey = scenes.background[:, None, None, None]
    images = np.broadcast_to(grey, (n, 3, size, size)).astype(np.float32).copy()
    for slot in range(scenes.shape.shape[1]):
        rows = np.flatnonzero(scenes.number > slot)
        if len(rows):
            mask = coverage(
                scenes.shape[rows, slot], scenes.center[rows, slot], scenes.radius[rows, slot], size
            )
            rgb = _RGB[scenes.color[rows, slot]][:, :, None, None]
            images[rows] = images[rows] * (1 - mask[:, None]) + rgb * mask[:, None]
    return torch.from_numpy(images)


def relation_vector(center_a: np.ndarray, center_b: np.ndarray) -> np.ndarray:
    """Unit vector from b to a, [N, 2]; the basis of "a is left of b" (x < 0) and "a is above b" (y
    < 0)."""
    offset = center_a - center_b
    return offset / np.maximum(np.linalg.norm(offset, axis=-1, keepdims=True), 1e-6)


def layout(
    rng: np.random.Generator,
    count: np.ndarray,
    related: Sequence[Sequence[Standing]] | np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Place non-overlapping shapes: [N] counts -> centers [N, K, 2], radii [N, K], K at least 4.

    `related` says of each scene which slots stand in which relation, within 40 degrees of the
    axis. An array [N] is short for relations of slot 0 to slot 1, -1 for none.
    """
    n, most = len(count), max([MAX_OBJECTS, *count.tolist()])
    stands = _standings(related)
    # ranges of the radii
    center = np.zeros((n, most, 2), np.float32)
    radius = np.zeros((n, most), np.float32)
    low = np.array([_RADIUS[c][0] for c in count], np.float32)
    high = np.array([_RADIUS[c][1] for c in count], np.float32)
    # crowded scenes one by one
    crowded = (count > MAX_OBJECTS) | (np.bincount(stands[:, 0], minlength=n) > 1)
    for i in np.flatnonzero(crowded):
        mine = stands[stands[:, 0] == i]
        center[i], radius[i] = _crowd(rng, int(count[i]), most, mine)
    # the others all at once; drawn again until nothing overlaps
    todo = np.flatnonzero(~crowded)
    while len(todo):
        slots = (len(todo), most)
        r = rng.uniform(low[todo, None], high[todo, None], slots).astype(np.float32)
        edge = (r + _MARGIN)[..., None]
        place = rng.random((*slots, 2), dtype=np.float32)
        c = (edge + place * (SIZE - 2 * edge)).astype(np.float32)
        good = _apart(c, r, count[todo])
        good &= _related(c, stands, todo)
        center[todo[good]], radius[todo[good]] = c[good], r[good]
        todo = todo[~good]
    return center, radius


def _crowd(
    rng: np.random.Generator, count: int, most: int, stands: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Place one scene that is rarely met: the first good one of many -> centers [K, 2], radii
    [K]."""
    while True:
        center, radius = good_layouts(rng, count, most, stands)
        if len(center):
            return center[0], radius[0]


def good_layouts(
    rng: np.random.Generator, count: int, most: int, stands: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw many layouts of up to LARGEST shapes and keep the good ones, perhaps none -> centers
    [M, K, 2], radii [M, K].

    stands: relations [R, 4] as rows (any number, slot a, slot b, index of the relation).
    """
    # draw many
    low, high = _RADIUS[count]
    r = rng.uniform(low, high, (_TRIES, most)).astype(np.float32)
    edge = (r + _MARGIN)[..., None]
    place = rng.random((_TRIES, most, 2), dtype=np.float32)
    c = (edge + place * (SIZE - 2 * edge)).astype(np.float32)
    # relations first: few are left to be measured
    rows = np.arange(_TRIES)
    for _, a, b, relation in stands:
        rows = rows[_stands_so(c[rows, a], c[rows, b], np.full(len(rows), relation))]
    rows = rows[_apart(c[rows], r[rows], np.full(len(rows), count))]
    return c[rows], r[rows]


def _standings(related: Sequence[Sequence[Standing]] | np.ndarray | None) -> np.ndarray:
    """List relations as rows (scene, slot a, slot b, relation): -> [M, 4] int64."""
    rows: list[tuple[int, ...]] = []
    if isinstance(related, np.ndarray):
        rows = [(int(i), 0, 1, int(related[i])) for i in np.flatnonzero(related >= 0)]
    elif related is not None:
        for i, some in enumerate(related):
            rows += [(i, *standing) for standing in some]
    return np.array(rows, np.int64).reshape(-1, 4)


def _apart(center: np.ndarray, radius: np.ndarray, count: np.ndarray) -> np.ndarray:
    good = np.ones(len(center), bool)
    for i in range(center.shape[1]):
        for j in range(i):
            gap = np.linalg.norm(center[:, i] - center[:, j], axis=-1) - radius[:, i] - radius[:, j]
            good &= (gap >= _GAP) | (count <= i)
    return good


def _related(center: np.ndarray, stands: np.ndarray, todo: np.ndarray) -> np.ndarray:
    """Say which of the drawn scenes [T], numbers `todo`, keep all of their relations."""
    # the relations of these scenes
    mine = stands[np.isin(stands[:, 0], todo)]
    row = np.searchsorted(todo, mine[:, 0])
    wrong = ~_stands_so(center[row, mine[:, 1]], center[row, mine[:, 2]], mine[:, 3])
    return np.bincount(row, wrong, len(todo)) == 0


def _stands_so(a: np.ndarray, b: np.ndarray, relation: np.ndarray) -> np.ndarray:
    """Say where a [M, 2] stands to b [M, 2] in a relation [M], within 40 degrees of the axis."""
    axis = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.float32)[relation]
    along = (relation_vector(a, b) * axis).sum(-1)
    return np.asarray(along > np.cos(np.deg2rad(40.0)))
