"""Prompts of the shapes benchmark in GenEval's own JSONL schema, and scenes that are true to them.

Six tasks as in GenEval (Ghosh et al. 2023): single_object, two_object, counting, colors, position,
color_attr. Some combinations (coloured shapes, counts, pairs, relations, colour pairings) are held
out: no training prompt asks for them, half of the test prompts do where the task has any. No
training scene shows a held-out coloured shape or count; a held-out pair or relation can still
appear in the scene of a prompt that leaves it open.

**Differs:** GenEval excludes a further object of the counted class in counting prompts only. Here
every prompt excludes everything that it does not name, so that painting more objects never pays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    RELATIONS,
    Scenes,
    Standing,
    layout,
)

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
NUMBERS = {2: "two", 3: "three", 4: "four"}

HELD_COLORED = frozenset(
    {("circle", "purple"), ("square", "yellow"), ("triangle", "red"), ("cross", "green")}
)
HELD_PAIRS = frozenset({frozenset({"circle", "triangle"})})
HELD_COUNTS = frozenset({("triangle", 3), ("cross", 2)})
HELD_POSITIONS = frozenset(
    {
        ("circle", "left of", "square"),
        ("square", "above", "cross"),
        ("triangle", "right of", "cross"),
        ("cross", "below", "circle"),
        ("square", "left of", "triangle"),
        ("triangle", "above", "square"),
    }
)
Record = dict[str, Any]


def _held_attribute(first: tuple[str, str], second: tuple[str, str]) -> bool:
    """Hold out every fourth colour pairing, by a rule that anyone can recompute, and all held-out
    coloured shapes."""
    if first in HELD_COLORED or second in HELD_COLORED:
        return True
    names = list(COLORS)
    a, b = sorted((first, second))
    return (names.index(a[1]) + 2 * names.index(b[1]) + CLASSES.index(a[0])) % 4 == 0


def entry(
    shape: str, count: int = 1, color: str | None = None, position: tuple[str, int] | None = None
) -> Record:
    """Return what a record asks for of one class; `position` is a relation and the place of the
    entry that it is to."""
    made: Record = {"class": shape, "count": count}
    if color is not None:
        made["color"] = color
    if position is not None:
        made["position"] = list(position)
    return made


def make_record(tag: str, include: list[Record], prompt: str, held_out: bool) -> Record:
    """Return a GenEval record that excludes everything that it does not include."""
    wanted = dict.fromkeys(CLASSES, 0)
    for wish in include:
        wanted[wish["class"]] += wish["count"]
    exclude = [{"class": shape, "count": number + 1} for shape, number in wanted.items()]
    return {
        "tag": tag,
        "include": include,
        "exclude": exclude,
        "prompt": prompt,
        "held_out": held_out,
    }


def _single() -> list[Record]:
    phrasings = (
        "a {}",
        "a photo of a {}",
        "a picture of a {}",
        "one {}",
        "an image of a {}",
        "there is a {}",
    )
    found = []
    for s, p in itertools.product(CLASSES, phrasings):
        found.append(make_record("single_object", [entry(s)], p.format(s), False))
    return found


def _pair() -> list[Record]:
    phrasings = ("a {} and a {}", "a photo of a {} and a {}", "a picture of a {} and a {}")
    found = []
    for a, b in itertools.permutations(CLASSES, 2):
        held, entries = frozenset({a, b}) in HELD_PAIRS, [entry(a), entry(b)]
        for p in phrasings:
            found.append(make_record("two_object", entries, p.format(a, b), held))
    return found


def plural(shape: str) -> str:
    """Return the plural of a class."""
    return shape + ("es" if shape.endswith("s") else "s")


def _count() -> list[Record]:
    phrasings = ("{} {}", "a photo of {} {}", "a picture of {} {}", "there are {} {}")
    out = []
    for s, (n, word), p in itertools.product(CLASSES, NUMBERS.items(), phrasings):
        text = p.format(word, plural(s))
        out.append(make_record("counting", [entry(s, n)], text, (s, n) in HELD_COUNTS))
    return out


def _colors() -> list[Record]:
    phrasings = ("a {} {}", "a photo of a {} {}")
    out = []
    for s, c, p in itertools.product(CLASSES, COLORS, phrasings):
        held = (s, c) in HELD_COLORED
        out.append(make_record("colors", [entry(s, color=c)], p.format(c, s), held))
    return out


def _position() -> list[Record]:
    phrasings = {
        "left of": ("a {} left of a {}", "a {} to the left of a {}"),
        "right of": ("a {} right of a {}", "a {} to the right of a {}"),
        "above": ("a {} above a {}", "a photo of a {} above a {}"),
        "below": ("a {} below a {}", "a photo of a {} below a {}"),
    }
    # as in GenEval the reference object comes first in `include`: "a tie above a sink" lists sink,
    # then tie
    out = []
    for (a, b), r in itertools.product(itertools.permutations(CLASSES, 2), RELATIONS):
        include = [entry(b), entry(a, position=(r, 0))]
        for p in phrasings[r]:
            out.append(
                make_record("position", include, p.format(a, b), (a, r, b) in HELD_POSITIONS)
            )
    return out


def _attribute() -> list[Record]:
    out: list[Record] = []
    for a, b in itertools.permutations(CLASSES, 2):
        for c, d in itertools.permutations(COLORS, 2):
            prompt = f"a {c} {a} and a {d} {b}"
            if (len(out) // 2) % 2:
                prompt = f"a photo of {prompt}"
            include = [entry(a, color=c), entry(b, color=d)]
            held = _held_attribute((a, c), (b, d))
            out.append(make_record("color_attr", include, prompt, held))
    return out


def all_records() -> dict[str, list[Record]]:
    """Every prompt of the benchmark by task, each record with its `held_out` mark."""
    makers = (_single, _pair, _count, _colors, _position, _attribute)
    return {task: maker() for task, maker in zip(TASKS, makers, strict=True)}


def base_records() -> list[Record]:
    """All prompts that are not held out: the captions of the base model's training."""
    every = itertools.chain(*all_records().values())
    return [record for record in every if not record["held_out"]]


_ALLOWED = np.ones((len(CLASSES), len(COLORS)), bool)  # of a training scene
for _shape, _color in HELD_COLORED:
    _ALLOWED[CLASSES.index(_shape), list(COLORS).index(_color)] = False


def _free_colors(rng: np.random.Generator, shape: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Draw a colour for each shape [M]; scenes for training never show a held-out coloured
    shape."""
    score = rng.random((len(shape), len(COLORS)))
    score[~_ALLOWED[shape] & ~held_out[:, None]] = -1.0
    return score.argmax(-1)


def _object_count(record: Record) -> int:
    """Count the objects that a record asks for."""
    return int(sum(wish["count"] for wish in record["include"]))


def _slots(include: Sequence[Record]) -> tuple[list[list[int]], list[Standing]]:
    """Deal slots out to include entries -> each entry's slots, and who stands how to whom."""
    # an object that stands in a relation comes before the one that it stands to
    order = range(len(include))
    if len(include) == 2 and "position" in include[1]:
        order = order[::-1]
    slots: list[list[int]] = [[] for _ in include]
    first = 0
    for i in order:
        slots[i] = list(range(first, first + include[i]["count"]))
        first += include[i]["count"]
    # every object of an entry stands so to every object of the other
    stands: list[Standing] = []
    for i, wish in enumerate(include):
        if "position" in wish:
            relation, other = RELATIONS.index(wish["position"][0]), wish["position"][1]
            pairs = itertools.product(slots[i], slots[other])
            stands += [(a, b, relation) for a, b in pairs]
    return slots, stands


def scenes_for(records: Sequence[Record], rng: np.random.Generator) -> Scenes:
    """Draw one scene true to each record; what the prompt leaves open is random."""
    # what the records say
    n, most = len(records), max([MAX_OBJECTS, *map(_object_count, records)])
    shape, color = np.zeros((n, most), np.int64), np.full((n, most), -1, np.int64)
    count = np.array([_object_count(record) for record in records], np.int64)
    related: list[list[Standing]] = []
    names = list(COLORS)
    for i, record in enumerate(records):
        slots, stands = _slots(record["include"])
        related.append(stands)
        for wish, places in zip(record["include"], slots, strict=True):
            shape[i, places] = CLASSES.index(wish["class"])
            if "color" in wish:
                color[i, places] = names.index(wish["color"])
    # the rest by chance
    held = np.array([bool(r.get("held_out", False)) for r in records])
    free = _free_colors(rng, shape.reshape(-1), np.repeat(held, most)).reshape(n, most)
    color = np.where(color < 0, free, color)
    center, radius = layout(rng, count, related)
    background = rng.uniform(0.88, 1.0, n).astype(np.float32)
    return Scenes(count, shape, color, center, radius, background)
