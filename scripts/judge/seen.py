"""What the judge says of scenes: one image, a caption, and a rule that is to be checked. It reads
the image with a small network of its own (assets/shapes-judge) and never asks the checker."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.evaluation.suites.shapes.prompts import all_records
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, SIZE

sys.path.insert(0, str(Path(__file__).parents[1] / "assets" / "shapes_judge"))
from judge_network import ODD, Judge, Thing, load_judge, stand_as_asked, things_on

CAPTION = re.compile(r'made from this caption: "(.+)"')
RULE = re.compile(r"keep this rule\? (.+)")
PROPOSE = re.compile(r"Name what makes it better as rules")
LIGHT = 0.75  # mean of a light image
MIDDLE = 0.25  # of the image's side: how far from its middle all is still in it
Record = dict[str, Any]
Kept = Callable[[Sequence[Thing], Record, Tensor], bool]


def _wanted(record: Record) -> Counter[int]:
    found: Counter[int] = Counter()
    for entry in record["include"]:
        found[CLASSES.index(entry["class"])] += entry["count"]
    return found


def _shapes(things: Sequence[Thing]) -> Counter[int]:
    return Counter(thing.shape for thing in things)


def _colors_fit(things: Sequence[Thing], record: Record, _: Tensor) -> bool:
    """Say whether every shape that is named with a colour is there in it."""
    there = Counter((thing.shape, thing.color) for thing in things)
    for entry in record["include"]:
        if "color" in entry:
            key = (CLASSES.index(entry["class"]), list(COLORS).index(entry["color"]))
            if there[key] < entry["count"]:
                return False
    return True


def _places_fit(things: Sequence[Thing], record: Record, _: Tensor) -> bool:
    """Say whether the shapes stand to each other as the caption says, where it says so."""
    groups: list[list[Thing]] = []
    for entry in record["include"]:
        mine = [thing for thing in things if thing.shape == CLASSES.index(entry["class"])]
        if "color" in entry:
            mine = [thing for thing in mine if thing.color == list(COLORS).index(entry["color"])]
        groups.append(mine)
    asked = [(i, one) for i, one in enumerate(record["include"]) if "position" in one]
    return all(all(groups) and stand_as_asked(groups, i, one) for i, one in asked)


def _near_middle(things: Sequence[Thing], _: Record, __: Tensor) -> bool:
    reach = MIDDLE * SIZE
    return all(bool(((thing.center - SIZE / 2).abs() <= reach).all()) for thing in things)


def _alone(things: Sequence[Thing], color: str) -> bool:
    return any(thing.color == list(COLORS).index(color) for thing in things)


RULES: dict[str, Kept] = {
    "Every kind of shape that the caption names is there.": lambda things, record, _: (
        _wanted(record).keys() <= _shapes(things).keys()
    ),
    "There are as many shapes as the caption says.": lambda things, record, _: (
        len(things) == sum(_wanted(record).values())
    ),
    "Of each kind of shape there are as many as the caption says.": lambda things, record, _: all(
        _shapes(things)[shape] == count for shape, count in _wanted(record).items()
    ),
    "Each shape has the colour that the caption gives it.": _colors_fit,
    "The shapes stand to each other as the caption says.": _places_fit,
    "Nothing is there that the caption does not name.": lambda things, record, _: (
        _shapes(things).keys() <= _wanted(record).keys()
    ),
    "Every shape is clean and can be told.": lambda things, _, __: (
        bool(things) and all(thing.shape != ODD for thing in things)
    ),
    "The image is light.": lambda _, __, image: float(image.mean()) > LIGHT,
    "There are at least two shapes.": lambda things, _, __: len(things) >= 2,
    "All shapes are near the middle.": _near_middle,
    "A red shape is there.": lambda things, _, __: _alone(things, "red"),
    "A purple shape is there.": lambda things, _, __: _alone(things, "purple"),
}
"""Rule -> whether it is kept, by what is seen of an image, its caption's record and its pixels."""


@cache
def _network() -> Judge:
    return load_judge()


@cache
def _captions() -> dict[str, Record]:
    found: dict[str, Record] = {}
    for records in all_records().values():
        found |= {record["prompt"]: record for record in records}
    return found


def _read(text: str) -> Record:
    """Read the caption of a question. Raises ValueError."""
    found = CAPTION.search(text)
    record = _captions().get(found[1]) if found else None
    if record is None:
        raise ValueError(f"expected a caption of assets/shapes, got {text[:120]!r}")
    return record


def said(images: Sequence[Tensor], text: str) -> dict[str, float]:
    """Answer whether one image [3, 64, 64] keeps a rule -> share of Yes and of No. Raises
    ValueError for what cannot be read."""
    found = RULE.search(text)
    rule = RULES.get(found[1].strip()) if found else None
    if rule is None:
        raise ValueError(f"expected a rule that this judge knows, got {text[:160]!r}")
    kept = float(rule(*_seen(images[0], _read(text))))
    return {"Yes": kept, "No": 1 - kept}


def proposed(images: Sequence[Tensor], text: str) -> str:
    """Write the rules that the first image keeps and the second does not, one a line."""
    record = _read(text)
    better, worse = (_seen(image, record) for image in images)
    lines = [rule for rule, kept in RULES.items() if kept(*better) and not kept(*worse)]
    return "\n".join(f"Rule: {line}" for line in lines or ["The image is light."])


def _seen(image: Tensor, record: Record) -> tuple[Sequence[Thing], Record, Tensor]:
    if image.shape != (3, SIZE, SIZE):
        raise ValueError(f"expected an image of {SIZE} x {SIZE} pixels, got {tuple(image.shape)}")
    with torch.no_grad():
        return things_on(_network(), image[None])[0], record, image
