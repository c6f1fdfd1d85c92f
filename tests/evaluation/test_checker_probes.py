"""Images that must not pass the shapes checker, and the grade of images that nearly do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from paintkit import RGB, WHOLE, X, Y, against_all, grades, mask, paint, record_of, rounded
from torch import Tensor

from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE

BACKGROUND = np.full(3, 0.95, np.float32)
FLAT = (1, 3, SIZE, SIZE)


def blank_probes() -> dict[str, Tensor]:
    """Return flat images, noise, mosaics of the palette, and everything at once."""
    rng = np.random.default_rng(0)
    probes = {f"flat {v}": torch.full(FLAT, v) for v in (0.0, 0.5, 0.95, 1.0)}
    probes |= {f"flat {c}": paint((WHOLE, c)) for c in COLORS}
    for i in range(3):
        probes[f"noise {i}"] = torch.from_numpy(rng.random(FLAT, np.float32))
    bright = 0.8 + 0.2 * rng.choice([-1.0, 1.0], FLAT)
    probes["bright noise"] = torch.from_numpy(bright)
    palette = np.stack(list(RGB.values()))
    for block in (2, 4, 8, 16):
        order = rng.permutation(np.arange((SIZE // block) ** 2) % 6).reshape(SIZE // block, -1)
        tiles = palette[order].repeat(block, 0).repeat(block, 1)
        mosaic = torch.from_numpy(tiles).permute(2, 0, 1)[None]
        probes[f"mosaic {block}"] = mosaic
        if block > 4:
            framed = torch.full(FLAT, 0.95)
            framed[:, :, 2:-2, 2:-2] = mosaic[:, :, 2:-2, 2:-2]
            probes[f"framed mosaic {block}"] = framed
    layers = []
    for i in range(16):
        x, y = (9, 24, 40, 55)[i // 4], (9, 24, 40, 55)[i % 4]
        layers.append((mask(CLASSES[i % 4], x, y, 6), list(COLORS)[i % 6]))
    return probes | {"all shapes in all colours": paint(*layers)}


def broken_probes() -> dict[str, Tensor]:
    """Return each shape broken in many ways, and squares that are half circles."""
    left, diagonal, fifth = ((X < 32) * WHOLE, (X > Y) * WHOLE, (X < 28) * WHOLE)
    hole, pink = (mask("circle", 32, 32, 6), BACKGROUND), np.array([0.95, 0.6, 0.75], np.float32)
    probes: dict[str, Tensor] = {}
    for kind in CLASSES:
        whole = mask(kind, 32, 32, 12)
        red, beside = (whole, "red"), (mask("circle", 39, 32, 10), "red")
        made = {
            "cut in half": paint((whole * left, "red")),
            "cut aslant": paint((whole * diagonal, "red")),
            "tiny": paint((mask(kind, 32, 32, 4), "red")),
            "half outside": paint((mask(kind, 0, 30, 12), "blue")),
            "a sliver outside": paint((mask(kind, 11, 30, 12), "black")),
            "a quarter outside": paint((mask(kind, 58, 30, 12), "blue")),
            "in two colours": paint(red, (whole * left, "blue")),
            "in two close colours": paint((whole, "purple"), (whole * left, "blue")),
            "a fifth of another colour": paint((whole, "green"), (whole * fifth, "black")),
            "of no palette colour": paint((whole, pink)),
            "merged with a circle": paint((mask(kind, 24, 32, 10), "red"), beside),
            "pierced": paint(red, hole),
            "on a coloured background": paint((WHOLE, "yellow"), red),
            "on grey": paint(red, background=0.6),
        }
        probes |= {f"{kind} {how}": image for how, image in made.items()}
    for r in (9.0, 11.0, 13.0):
        for t in (0.6, 0.65, 0.7):
            probes[f"rounded square {t} of {r}"] = paint((rounded(t, r), "green"))
    return probes


@pytest.mark.parametrize(("probes", "least"), [(blank_probes, 0.1), (broken_probes, 1.0)])
def test_no_probe_passes_any_record(probes: Any, least: float) -> None:
    """Blank and crowded images earn nothing; a broken shape earns less than a whole one."""
    passed = {}
    for name, image in probes().items():
        strict, graded = against_all(image)
        if strict or graded >= least:
            passed[name] = graded
    assert not passed


ONE = (mask("circle", 20, 20, 11), "red")
MIDDLE = (mask("circle", 32, 32, 11), "red")
SQUARE = (mask("square", 14, 14, 9), "red")
TWICE = (SQUARE, (mask("square", 46, 16, 9), "blue"))
CROSSED = (SQUARE, (mask("cross", 32, 48, 9), "green"))
# 2x2 pixels each: too small to be objects
SPECKS = ((X % 8 < 2) & (Y % 8 < 2) & (np.hypot(X - 32, Y - 32) > 18)).astype(np.float32)


def faint(contrast: float) -> Tensor:
    """Return a right circle with a small square of little contrast."""
    return paint(ONE, (mask("square", 48, 48, 4), BACKGROUND - np.float32(contrast)))


CIRCLE_ONLY, SQUARE_ONLY = record_of("circle"), record_of("square")
# GenEval: without `exclude` more objects are fine
ANY = {"include": [{"class": "square", "count": 1}]}
# image, record, the bounds of the grade; 1 to 1 is a pass
SPOILT = {
    "right": (paint(ONE), CIRCLE_ONLY, 1, 1),
    "faint .14": (faint(0.14), CIRCLE_ONLY, 0.5, 0.999),
    "faint .2": (faint(0.2), CIRCLE_ONLY, 0.5, 0.999),
    "faint .3": (faint(0.3), CIRCLE_ONLY, 0.5, 0.999),
    "faint .5": (faint(0.5), CIRCLE_ONLY, 0.5, 0.999),
    "few specks": (paint((SPECKS * (Y < 8), "blue"), MIDDLE), CIRCLE_ONLY, 0.75, 0.9),
    "specks": (paint((SPECKS, "blue"), MIDDLE), CIRCLE_ONLY, 0.2, 0.75),
    "dark": (paint(MIDDLE, background=0.7), CIRCLE_ONLY, 0.2, 0.75),
    "alone": (paint(SQUARE), SQUARE_ONLY, 1, 1),
    "twice": (paint(*TWICE), SQUARE_ONLY, 0, 0.7),
    "with a cross": (paint(*CROSSED), SQUARE_ONLY, 0, 0.7),
    "twice, allowed": (paint(*TWICE), ANY, 1, 1),
    "with a cross, allowed": (paint(*CROSSED), ANY, 1, 1),
}


def test_what_spoils_a_right_image_fails_and_costs() -> None:
    """Faint extra objects, dirt, a dark background, forbidden objects."""
    assert SPECKS.sum() > 120 and 20 < (SPECKS * (Y < 8)).sum() < 40
    images, records, low, high = zip(*SPOILT.values(), strict=True)
    verdict = check(torch.cat(images), list(records))
    for i, name in enumerate(SPOILT):
        assert low[i] <= float(verdict.graded[i]) <= high[i], name
        assert bool(verdict.strict[i]) == (low[i] == 1), name
    by_name = dict(zip(SPOILT, zip(verdict.clean, verdict.exclude_ok, strict=True), strict=True))
    assert not by_name["few specks"][0] and not by_name["specks"][0] and not by_name["dark"][0]
    assert not by_name["with a cross"][1]


def test_graded_rises_as_the_colour_comes_closer() -> None:
    images = []
    for t in (0.0, 0.3, 0.45, 0.6, 1.0):
        images.append(paint((MIDDLE[0], RGB["blue"] * (1 - t) + RGB["green"] * t)))
    scores = grades(images, record_of("circle", color="green"))
    assert scores[0] < 0.6 and scores[-1] == 1
    assert scores == sorted(scores) and scores[1] < scores[2] < scores[3]


def test_graded_rises_as_the_position_turns() -> None:
    """The circle turns around the square, from its right to its left."""
    square = {"class": "square", "count": 1}
    circle = {"class": "circle", "count": 1, "position": ["left of", 0]}
    images = []
    for angle in np.deg2rad((0, 50, 90, 130, 180)):
        x, y = 32 + 20 * np.cos(angle), 32 + 20 * np.sin(angle)
        there, opposite = mask("circle", x, y, 8), mask("square", 64 - x, 64 - y, 8)
        images.append(paint((there, "red"), (opposite, "black")))
    exclude = [{"class": c, "count": n} for c, n in zip(CLASSES, (2, 2, 1, 1), strict=True)]
    scores = grades(images, {"include": [square, circle], "exclude": exclude})
    assert scores == sorted(scores) and scores[-1] == 1
    assert scores[0] < scores[1] < scores[2] < 0.95
