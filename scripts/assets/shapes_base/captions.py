"""Dense captions: what stands where in a scene, said in one of many true ways."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from flowrl.evaluation.suites.shapes.prompts import HELD_POSITIONS, _held_attribute
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    RELATIONS,
    Scenes,
    relation_vector,
)

AXES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)], np.float32)
"""Directions of RELATIONS, in pixels, y down."""


class Thing(NamedTuple):
    """One object of a scene, in words and pixels."""

    shape: str
    color: str
    center: np.ndarray  # [2] (x, y)
    radius: float

    def named(self, colored: bool = True, sized: bool = False) -> str:
        """Name the object; also by its colour, and by its size if that is big or small."""
        size = "big " if self.radius > 11 else "small " if self.radius < 9.3 else ""
        return f"{size if sized else ''}{self.color + ' ' if colored else ''}{self.shape}"

    def place(self) -> str:
        """Name the place in the image: rows and columns of three, "middle" for the centre."""
        x, y = self.center
        row = "top" if y < 24 else "bottom" if y > 40 else ""
        column = "left" if x < 24 else "right" if x > 40 else ""
        return f"{row} {column}".strip() or "middle"


def things_of(scenes: Scenes, index: int) -> list[Thing]:
    """List the objects of one scene, in the order of its slots."""
    out = []
    for slot in range(scenes.number[index]):
        shape = CLASSES[scenes.shape[index, slot]]
        color = list(COLORS)[scenes.color[index, slot]]
        radius = float(scenes.radius[index, slot])
        out.append(Thing(shape, color, scenes.center[index, slot], radius))
    return out


def relation_between(a: Thing, b: Thing) -> str | None:
    """Say how `a` stands to `b`; None where that is not clear, or a held-out relation."""
    along = AXES @ relation_vector(a.center[None], b.center[None])[0]
    relation = RELATIONS[int(along.argmax())]
    if (a.shape, relation, b.shape) in HELD_POSITIONS:
        return None
    return relation if along.max() > np.cos(np.deg2rad(40.0)) else None


class Style(NamedTuple):
    """The choices of a wording; numbers are drawn evenly from 0 to 1."""

    kind: float
    coin: float
    the: bool  # "to the left of" instead of "left of"
    order: np.ndarray  # in which the objects are named
    sized: bool


def draw_style(number: int, rng: np.random.Generator) -> Style:
    """Draw how `number` objects are spoken of."""
    kind, coin, the = rng.random(), rng.random(), rng.random() < 0.3
    order = rng.permutation(number)
    return Style(kind, coin, the, order, rng.random() < 0.25)


def dense_caption(things: list[Thing], rng: np.random.Generator) -> str:
    """Say what is where in one of many ways; equal `rng`s word twins alike.

    Colours of a held-out pairing stay unsaid.
    """
    style = draw_style(len(things), rng)
    things = [things[i] for i in style.order]
    if len(things) == 1:
        where = things[0].place() if style.kind > 0.3 else ""
        return f"a {things[0].named(style.kind < 0.7, style.sized)} {where}".strip()
    pairs = [(a, b) for a, b in itertools.combinations(things, 2) if a.shape != b.shape]
    held = [_held_attribute((a.shape, a.color), (b.shape, b.color)) for a, b in pairs]
    if len(things) == 2 and pairs:
        return _of_two(things[0], things[1], style, not any(held))
    return _of_many(things, style, not any(held))


def _of_two(a: Thing, b: Thing, style: Style, colored: bool) -> str:
    """Name two objects of different shape by their relation, their colours, or their places."""
    kind, coin, the, _, sized = style
    # by how one stands to the other
    relation = relation_between(a, b)
    if kind < 0.45 and relation:
        colored &= coin < 0.8
        words = f"to the {relation}" if the and "of" in relation else relation
        return f"a {a.named(colored, sized)} {words} a {b.named(colored, sized)}"
    # by colours alone
    if kind < 0.6 and colored:
        return f"a {a.named()} and a {b.named()}"
    # by places
    colored &= coin < 0.75
    first, second = a.named(colored, sized), b.named(colored, sized)
    return f"a {first} {a.place()} and a {second} {b.place()}"


def _of_many(things: list[Thing], style: Style, colored: bool) -> str:
    """List objects, most often with their places; four of them without "a" and "and"."""
    parts = []
    for thing in things:
        place = thing.place() if style.kind > 0.2 else ""
        parts.append(f"{thing.named(colored and style.kind < 0.85)} {place}".strip())
    if len(things) == 4:
        return " ".join(parts)
    return " ".join(f"a {text}" for text in parts[:-1]) + f" and a {parts[-1]}"
