"""Scenes in twins: the same things on the same places, told apart by word order only."""

from __future__ import annotations

import numpy as np
from captions import dense_caption, things_of
from common import CAPTIONS

from flowrl.evaluation.suites.shapes.prompts import (
    HELD_COUNTS,
    HELD_POSITIONS,
    Record,
    _free_colors,
    _held_attribute,
    scenes_for,
)
from flowrl.evaluation.suites.shapes.scene import CLASSES, MAX_OBJECTS, Scenes, layout

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


def twins(
    kind: str, pool: list[Record], n: int, rng: np.random.Generator
) -> tuple[Scenes, list[list[str]]]:
    """Draw 2n scenes of a kind, twin after twin, and CAPTIONS true captions of each.

    Twins show the same things on the same places: the other way round (two objects and more), or in
    each other's colours (`color_attr`). Where that is held out, and where there is one kind of
    thing, the twin is any other scene.

    Args:
        kind: one of KINDS. pool: the records of that task; none for `mixed` scenes, whose first
        caption is a dense one.
    """
    # the first of each two, and its prompt
    asked: list[Record] = [{"prompt": ""}] * n
    if kind == "mixed":
        one = mixed_scenes(n, rng)
    else:
        asked = [pool[k] for k in rng.integers(0, len(pool), n)]
        one = scenes_for(asked, rng)
    prompts = [record["prompt"] for record in asked]
    # the second, turned
    two, others = Scenes(*(field.copy() for field in one)), list(prompts)
    turned = [_turn(kind, asked[i], one, two, others, i) for i in range(n)]
    strangers = [i for i in range(n) if not turned[i]]
    # or any other scene
    if strangers:
        chosen = [pool[k] for k in rng.integers(0, len(pool), len(strangers))]
        for field, new in zip(two, scenes_for(chosen, rng), strict=True):
            field[strangers] = new
        for i, record in zip(strangers, chosen, strict=True):
            others[i] = record["prompt"]
    both = _side_by_side(one, two)
    return both, _captions(both, prompts, others, rng)


def mixed_scenes(n: int, rng: np.random.Generator) -> Scenes:
    """Draw scenes of three or four objects of several kinds, with nothing held-out in them."""
    count = rng.choice([3, 4], n, p=[0.65, 0.35])
    shape = rng.integers(0, len(CLASSES), (n, MAX_OBJECTS))
    for i in range(n):
        while not _mixed(shape[i, : count[i]]):
            shape[i] = rng.integers(0, len(CLASSES), MAX_OBJECTS)
    color = _free_colors(rng, shape.reshape(-1), np.zeros(n * MAX_OBJECTS, bool))
    center, radius = layout(rng, count)
    background = rng.uniform(0.88, 1.0, n).astype(np.float32)
    return Scenes(count, shape, color.reshape(n, MAX_OBJECTS), center, radius, background)


def _mixed(shape: np.ndarray) -> bool:
    """Say whether shapes [M] are of several classes, with no held-out count among them."""
    classes, numbers = np.unique(shape, return_counts=True)
    found = [(CLASSES[k], int(m)) for k, m in zip(classes, numbers, strict=True)]
    return len(found) > 1 and not HELD_COUNTS.intersection(found)


def _side_by_side(one: Scenes, two: Scenes) -> Scenes:
    """Join n scenes and their twins: -> 2n scenes, each before its twin."""
    fields = []
    for pair in zip(one, two, strict=True):
        both = np.stack(pair, 1)
        fields.append(both.reshape(-1, *both.shape[2:]))
    return Scenes(*fields)


def _captions(
    both: Scenes, prompts: list[str], others: list[str], rng: np.random.Generator
) -> list[list[str]]:
    """Caption 2n scenes -> [2n][CAPTIONS]; twins are worded by the same random numbers."""
    captions = []
    for i, pair in enumerate(zip(prompts, others, strict=True)):
        seeds = rng.integers(0, 2**31, CAPTIONS).tolist()
        for side, prompt in enumerate(pair):
            things = things_of(both, 2 * i + side)
            row = [dense_caption(things, np.random.default_rng(seed)) for seed in seeds]
            captions.append([prompt or row[0], *row[1:]])
    return captions


def _turn(kind: str, record: Record, one: Scenes, two: Scenes, prompts: list[str], i: int) -> bool:
    """Make scene i of `two` the twin of that of `one`, in place; False where it has none."""
    if kind in ("single_object", "colors", "counting"):
        return False
    if kind == "color_attr":
        return _swap_colors(one, two, prompts, i)
    # the opposite relation, unless it is held out
    if kind == "position":
        reference, entry = record["include"]
        relation = entry["position"][0]
        if (entry["class"], OPPOSITE[relation], reference["class"]) in HELD_POSITIONS:
            return False
        prompts[i] = prompts[i].replace(relation, OPPOSITE[relation])
    # each object on the place of the one before
    turned = np.roll(np.arange(one.number[i]), 1)
    two.center[i, : len(turned)] = one.center[i, turned]
    two.radius[i, : len(turned)] = one.radius[i, turned]
    return True


def _swap_colors(one: Scenes, two: Scenes, prompts: list[str], i: int) -> bool:
    """Give two objects each other's colours, in scene and prompt; False where that is held out."""
    a, b = things_of(one, i)
    if _held_attribute((a.shape, b.color), (b.shape, a.color)):
        return False
    two.color[i, :2] = one.color[i, 1::-1]
    swapped = {a.color: b.color, b.color: a.color}
    prompts[i] = " ".join(swapped.get(word, word) for word in prompts[i].split())
    return True
