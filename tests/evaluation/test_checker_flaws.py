"""What templates and mean colours do not see is refused too; true scenes are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from paintkit import RGB, mask, paint, record_of
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.checker import check, judge_detections
from flowrl.evaluation.suites.shapes.detect import detect, has_corners
from flowrl.evaluation.suites.shapes.scene import CLASSES, SIZE
from rewards.shapes import shapes

FINE = 8  # a polygon's pixel is the mean of so many points each way


def polygon(sides: int, r: float, turn: float) -> np.ndarray:
    """Draw a regular polygon of circumscribed radius r: the points on the inner side of every
    edge."""
    at = (np.arange(SIZE * FINE) + 0.5) / FINE - 32
    x, y = at[None, :], at[:, None]
    apothem = r * np.cos(np.pi / sides)
    inside = np.ones((SIZE * FINE,) * 2, bool)
    for k in range(sides):
        angle = turn + 2 * np.pi * k / sides
        inside &= x * np.cos(angle) + y * np.sin(angle) <= apothem
    return inside.reshape(SIZE, FINE, SIZE, FINE).mean((1, 3), dtype=np.float32)


def block(x: int, y: int, width: int, height: int) -> np.ndarray:
    out = np.zeros((SIZE, SIZE), np.float32)
    out[y : y + height, x : x + width] = 1
    return out


def every(step: int, *, of: str) -> np.ndarray:
    """Draw lines one pixel wide, every so many pixels."""
    line = (np.arange(SIZE) % step == 0).astype(np.float32)
    return np.broadcast_to(line if of == "columns" else line[:, None], (SIZE, SIZE))


def lighter(color: str, by: float) -> np.ndarray:
    return np.clip(RGB[color] + by, 0, 1)


def probes() -> dict[str, tuple[str, Tensor]]:
    """Name -> the class that is asked for, and an image that must not pass as it."""
    circle, square = mask("circle", 32, 32, 12), mask("square", 32, 32, 12)
    grey = np.full(3, 0.95)
    out: dict[str, tuple[str, Tensor]] = {}
    for sides in (5, 6):
        for r in (9.0, 11.0, 13.0):
            for turn in (0.0, 0.2, 0.4):
                out[f"{sides} sides, {r}, {turn}"] = (
                    "circle",
                    paint((polygon(sides, r, turn), "red")),
                )
    for contrast in (0.08, 0.1, 0.11):
        ghost = mask("square", 51, 51, 8), grey - contrast
        out[f"ghost {contrast}"] = "circle", paint((mask("circle", 20, 20, 11), "red"), ghost)
    for size in (2, 3):
        out[f"speck {size}"] = "circle", paint((circle, "red"), (block(4, 4, size, size), "blue"))
    for of in ("columns", "rows"):
        behind = (every(4, of=of) * (1 - circle), grey - 0.1)
        out[f"background of {of}"] = "circle", paint((circle, "red"), behind)
        out[f"circle of {of}"] = (
            "circle",
            paint((circle, "red"), (circle * every(2, of=of), lighter("red", 0.2))),
        )
    out["blue on red"] = "square", paint((square, "red"), (mask("circle", 32, 32, 2), "blue"))
    out["green on black"] = "square", paint((square, "black"), (block(30, 30, 4, 3), "green"))
    return out


PROBES = probes()


@pytest.mark.parametrize("name", PROBES)
def test_flawed_images_never_pass(name: str) -> None:
    kind, image = PROBES[name]
    verdict = check(image, [record_of(kind)])
    assert not verdict.strict[0] and not verdict.clean[0] and verdict.graded[0] < 1


GOOD: dict[str, Callable[[float], tuple[str, Tensor]]] = {
    kind: lambda r, kind=kind: (kind, paint((mask(kind, 31.7, 32.4, r), "purple")))  # type: ignore[misc]
    for kind in CLASSES
}


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("r", [8.0, 9.3, 10.5, 13.0])
def test_drawn_shapes_pass(kind: str, r: float) -> None:
    name, image = GOOD[kind](r)
    assert check(image, [record_of(name)]).strict.all()


def test_flaws_have_to_be_looked_for() -> None:
    """A verdict on detections that were made without looking for flaws would let them pass."""
    with pytest.raises(DataError, match="find_flaws=True"):
        judge_detections(detect(paint((mask("circle", 32, 32, 11), "red"))), [record_of("circle")])


def test_the_reward_scores_it() -> None:
    """A right image, a square for a circle, and a hexagon for a circle."""
    images = torch.cat(
        [paint((mask(kind, 32, 32, 11), "red")) for kind in ("circle", "square")]
        + [paint((polygon(6, 11, 0.2), "red"))]
    )
    batch = RewardBatch(images, [""] * 3, torch.zeros(3), [record_of("circle")] * 3, torch.zeros(3))
    assert shapes(mode="strict")(batch).tolist() == [1, 0, 0]


def test_harmonics_of_a_wavy_disk() -> None:
    """``1 + eps cos(n angle)`` has the harmonic (n + 2) eps / 2: for n = 4 that is 0.15 at
    eps = 0.05 and 0.09 at eps = 0.03; the limit is 0.14."""
    at = (np.arange(SIZE * FINE) + 0.5) / FINE - 32
    angle, away = np.arctan2(at[:, None], at[None, :]), np.hypot(at[:, None], at[None, :])
    for eps, bad in ((0.05, True), (0.03, False)):
        inside = away < 12 * (1 + eps * np.cos(4 * angle))
        disk = inside.reshape(SIZE, FINE, SIZE, FINE).mean((1, 3), dtype=np.float32)
        assert has_corners(disk[None]).tolist() == [bad]
