"""Paint shapes by hand, and judge the image as the embedded benchmark does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.evaluation.suites.shapes.checker import check, judge_detections
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.prompts import all_records
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE, coverage

RECORDS = all_records()
EVERY = [record for records in RECORDS.values() for record in records]
RGB = {name: np.array(rgb, np.float32) / 255 for name, rgb in COLORS.items()}
Y, X = np.mgrid[:SIZE, :SIZE] + np.float32(0.5)
WHOLE = np.ones((SIZE, SIZE), np.float32)


def mask(kind: str, x: float, y: float, r: float) -> np.ndarray:
    """Return the coverage [64, 64] of one shape."""
    place = np.array([[x, y]], np.float32)
    return coverage(np.array([CLASSES.index(kind)]), place, np.array([r], np.float32))[0]


def rounded(roundness: float, r: float) -> np.ndarray:
    """Draw a square of half side `r` with corners of radius `roundness * r`: 1 is a circle."""
    corner = roundness * r
    dx, dy = np.abs(X - 32) - r + corner, np.abs(Y - 32) - r + corner
    outside = np.hypot(np.maximum(dx, 0), np.maximum(dy, 0))
    inside = np.minimum(np.maximum(dx, dy), 0)
    return np.clip(0.5 - (outside + inside - corner), 0, 1)


def paint(*layers: tuple[np.ndarray, Any], background: float = 0.95) -> Tensor:
    """Paint masks [64, 64] in colours over each other -> [1, 3, 64, 64]."""
    image = np.full((SIZE, SIZE, 3), background, np.float32)
    for part, color in layers:
        rgb = RGB[color] if isinstance(color, str) else color
        image = image * (1 - part[..., None]) + part[..., None] * rgb
    return torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]


def record_of(shape: str, count: int = 1, color: str | None = None) -> dict[str, Any]:
    """Ask for `count` of one shape and for no other."""
    wanted = {"class": shape, "count": count} | ({"color": color} if color else {})
    exclude = [{"class": c, "count": (count if c == shape else 0) + 1} for c in CLASSES]
    return {"tag": "test", "include": [wanted], "exclude": exclude}


def against_all(image: Tensor) -> tuple[bool, float]:
    """Judge one image by every record of the benchmark: does it pass any, and its best grade."""
    found = detect(image, find_flaws=True)
    repeated = Detections(
        *(np.repeat(field, len(EVERY), 0) for field in found if field is not None)
    )
    verdict = judge_detections(repeated, EVERY)
    return bool(verdict.strict.any()), float(verdict.graded.max())


def grades(images: list[Tensor], record: dict[str, Any]) -> list[float]:
    """Grade several images by one record."""
    return check(torch.cat(images), [record] * len(images)).graded.tolist()
