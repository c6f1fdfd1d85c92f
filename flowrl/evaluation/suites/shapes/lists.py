"""Disjoint lists of prompts: to train on, to choose by (validation), to report (test), and harder
ones.

What is split are scenes, not texts. "A square right of a circle" and "a circle left of a square"
are one scene, so are "a circle and a square" and "a square and a circle", and every wording of a
scene stands in the list of the scene. Only `single_object` is split by wording: it has four scenes,
and every other task shows them too. The test list has every scene with a held-out combination, up
to a limit. Choose hyper-parameters, guidance and steps on the validation list; the test list is for
final figures.

Harder prompts are made of the same words, so that a model with the benchmark's vocabulary can read
them. There is no word for five: five objects are "three circles and two squares". The six tasks are
three kinds of objects, a group in a relation, five and six objects, two objects of one class that
only their colours tell apart, with and without a relation, and a pair of which one has a colour.
None asks for a coloured shape that is held out.

Three kinds of prompts are out of distribution: `phrasing`, known scenes in words that no other
prompt uses; `combination`, held-out coloured shapes where the benchmark does not ask for them; and
`crossing`, what two tasks of the benchmark ask for, in one prompt.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from flowrl.evaluation.suites.shapes.prompts import (
    HELD_COLORED,
    NUMBERS,
    TASKS,
    Record,
    all_records,
    entry,
    make_record,
    plural,
)
from flowrl.evaluation.suites.shapes.scene import CLASSES, COLORS, RELATIONS

MOST_HELD, MOST_SEEN, MOST_TRAIN = 12, 12, 60
"""Scenes of a task, at most: held-out ones of the test list; the others of the test list and of
the validation list, each; those of the training list."""

OOD_EACH = 24
"""Prompts of each kind of the out-of-distribution list."""

FINAL_IMAGES = 144
"""Images of a task of the final list, about: one row for each, in its scene's every wording."""

_FLIPPED = {"right of": "left of", "below": "above"}

HARD_TASKS = (
    "three_kinds",
    "group_position",
    "five_six",
    "same_class",
    "same_class_pair",
    "one_colored",
)
_FREE = [pair for pair in itertools.product(CLASSES, COLORS) if pair not in HELD_COLORED]
_PHRASINGS = {
    "single_object": "an image of one {0}",
    "two_object": "an image of one {0} and one {1}",
    "counting": "an image of {0}",
    "colors": "one {0}",
    "position": "there is a {0} {2} a {1}",
    "color_attr": "there is one {0} and one {1}",
}
"""Wordings that none of the benchmark's prompts has, one for each task."""


class Lists(NamedTuple):
    """Prompts with no scene in two lists."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]


def scene_key(record: Record) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what a record asks for, however it is said: equal for all wordings of a scene."""
    things = []
    for wish in record["include"]:
        things.append((wish["class"], wish["count"], wish.get("color", "")))
    stands = []
    for i, wish in enumerate(record["include"]):
        if "position" in wish:
            relation, other = wish["position"]
            one, two = things[i], things[other]
            if relation in _FLIPPED:
                relation, one, two = _FLIPPED[relation], two, one
            stands.append((one, relation, two))
    return tuple(sorted(things)), tuple(sorted(stands))


def _wording(record: Record) -> str:
    """Return a prompt with its class left open."""
    return str(record["prompt"]).replace(record["include"][0]["class"], "*")


def benchmark_lists(seed: int = 0) -> Lists:
    """Split the prompts of the benchmark's six tasks."""
    rng = random.Random(seed)
    whole = Lists([], [], [])
    for task, records in all_records().items():
        key = _wording if task == "single_object" else scene_key
        _add(whole, _split(records, key, rng))
    return whole


def hard_lists(seed: int = 0) -> Lists:
    """Split the harder prompts, at most 60 scenes of each task."""
    rng = random.Random(seed)
    whole = Lists([], [], [])
    for records in hard_records().values():
        scenes = sorted({scene_key(record) for record in records}, key=repr)
        kept = set(rng.sample(scenes, min(len(scenes), MOST_TRAIN)))
        some = [record for record in records if scene_key(record) in kept]
        _add(whole, _split(some, scene_key, rng))
    return whole


def ood_list(seed: int = 0) -> list[Record]:
    """Draw the out-of-distribution prompts; it is for testing only.

    Scenes in other words are test scenes of the benchmark without held-out combinations, and the
    other kinds are scenes that no other list has. So no scene of it is trained on.
    """
    rng = random.Random(seed)
    # test scenes in other words, each scene once
    said: dict[tuple[str, Hashable], Record] = {}
    for record in benchmark_lists(seed).test:
        if not record["held_out"]:
            said.setdefault((record["tag"], scene_key(record)), rephrased(record))
    known = list(said)
    chosen = []
    for task in TASKS:
        mine = [key for key in known if key[0] == task]
        chosen += rng.sample(mine, min(len(mine), OOD_EACH // len(TASKS)))
    out = [said[key] for key in chosen]
    # what nobody asks for elsewhere
    for records in (combinations(), crossings()):
        out += rng.sample(records, OOD_EACH)
    return out


def final_list(seed: int = 0) -> list[Record]:
    """Draw the list that `docs/results.md` is judged by: scenes that no other list has.

    The benchmark has such scenes in `color_attr` alone; the other tasks are those of the harder
    tier and of the out-of-distribution list that have some left, crossings by what they cross. A
    task has up to `FINAL_IMAGES` scenes, and each scene as many rows as bring the task to about so
    many images, of one image each. Rows of a scene have its key in `scene`: they are one draw.
    """
    rng = random.Random(seed)
    used = set()
    for lists in (benchmark_lists(seed), hard_lists(seed)):
        used |= {scene_key(record) for records in lists for record in records}
    used |= {scene_key(record) for record in ood_list(seed)}
    out = []
    for task, records in _tasks_with_many_scenes().items():
        # every wording of each scene that is left
        wordings: dict[Hashable, list[Record]] = {}
        for record in records:
            if scene_key(record) not in used:
                wordings.setdefault(scene_key(record), []).append(record)
        scenes = sorted(wordings, key=repr)
        if not scenes:
            continue
        # as many rows for each
        chosen = rng.sample(scenes, min(len(scenes), FINAL_IMAGES))
        each = round(FINAL_IMAGES / len(chosen))
        for number, scene in enumerate(chosen):
            said = itertools.islice(itertools.cycle(wordings[scene]), each)
            out += [{**record, "tag": task, "scene": f"{task} {number}"} for record in said]
    return out


def _tasks_with_many_scenes() -> dict[str, list[Record]]:
    """Return every record of the benchmark and beyond by task, crossings by what they cross."""
    tasks = {**all_records(), **hard_records(), "combination": combinations()}
    for record in crossings():
        stands = any("position" in wish for wish in record["include"])
        name = "colored_count" if len(record["include"]) == 1 else "counted_pair"
        tasks.setdefault("colored_position" if stands else name, []).append(record)
    return tasks


def _add(whole: Lists, part: Lists) -> None:
    for mine, more in zip(whole, part, strict=True):
        mine += more


def _split(
    records: Sequence[Record], key: Callable[[Record], Hashable], rng: random.Random
) -> Lists:
    """Split one task by scene: a fifth of the seen scenes for validation, a fifth for the test."""
    # scenes, those with a held-out wording apart
    every = dict.fromkeys(key(record) for record in records)
    held = {key(record) for record in records if record["held_out"]}
    seen = [scene for scene in every if scene not in held]
    rng.shuffle(seen)
    share = min(MOST_SEEN, max(1, round(len(seen) / 5)))
    # which list has which of them
    hidden = [scene for scene in every if scene in held]
    test = {*rng.sample(hidden, min(len(hidden), MOST_HELD)), *seen[:share]}
    validation = set(seen[share : 2 * share])
    train = set(seen[2 * share : 2 * share + MOST_TRAIN])
    lists = []
    for scenes in (train, validation, test):
        lists.append([record for record in records if key(record) in scenes])
    return Lists(*lists)


def hard_records() -> dict[str, list[Record]]:
    """Every harder prompt by task."""
    makers = (
        _three_kinds,
        _group_position,
        _five_six,
        _same_class,
        _same_class_pair,
        _one_colored,
    )
    return {task: maker() for task, maker in zip(HARD_TASKS, makers, strict=True)}


def _many(shape: str, count: int, color: str | None = None) -> str:
    """Name objects of one class: "a red circle", "two red circles"."""
    named = f"{color} " if color else ""
    return f"{NUMBERS[count]} {named}{plural(shape)}" if count > 1 else f"a {named}{shape}"


def _three_kinds() -> list[Record]:
    """Three classes, without colours and with three different ones."""
    out = []
    for shapes in itertools.permutations(CLASSES, 3):
        colors: list[tuple[str | None, ...]] = [(None, None, None)]
        colors += itertools.permutations(COLORS, 3)
        for chosen in colors:
            if HELD_COLORED.isdisjoint(zip(shapes, chosen, strict=True)):
                pairs = list(zip(shapes, chosen, strict=True))
                text = " and ".join(_many(shape, 1, color) for shape, color in pairs)
                include = [entry(shape, color=color) for shape, color in pairs]
                out.append(make_record("three_kinds", include, text, False))
    return out


def _group_position() -> list[Record]:
    """Two or three objects of a colour, all in one relation to an object of another class."""
    out = []
    for (a, color), b, number in itertools.product(_FREE, CLASSES, (2, 3)):
        for relation in RELATIONS if a != b else ():
            include = [entry(b), entry(a, number, color, (relation, 0))]
            text = f"{_many(a, number, color)} {relation} {_many(b, 1)}"
            out.append(make_record("group_position", include, text, False))
    return out


def _five_six() -> list[Record]:
    """Five or six objects of two classes."""
    out = []
    for a, b in itertools.permutations(CLASSES, 2):
        for n, m in ((3, 2), (2, 3), (4, 1), (1, 4), (4, 2), (2, 4), (3, 3)):
            include = [entry(a, n), entry(b, m)]
            text = f"{_many(a, n)} and {_many(b, m)}"
            out.append(make_record("five_six", include, text, False))
    return out


def _same_class() -> list[Record]:
    """Two objects of one class, told apart by their colours, in a relation."""
    out = []
    for (a, first), (b, second) in itertools.permutations(_FREE, 2):
        for relation in RELATIONS if a == b else ():
            include = [entry(a, color=second), entry(a, color=first, position=(relation, 0))]
            text = f"a {first} {a} {relation} a {second} {a}"
            out.append(make_record("same_class", include, text, False))
    return out


def _same_class_pair() -> list[Record]:
    """Two objects of one class, told apart by their colours alone."""
    out = []
    for (a, first), (b, second) in itertools.permutations(_FREE, 2):
        if a == b:
            include = [entry(a, color=first), entry(a, color=second)]
            text = f"a {first} {a} and a {second} {a}"
            out.append(make_record("same_class_pair", include, text, False))
    return out


def _one_colored() -> list[Record]:
    """Two objects, one with a colour, in either order; the other may have any."""
    out = []
    for (a, color), b in itertools.product(_FREE, CLASSES):
        if a != b:
            colored, plain = entry(a, color=color), entry(b)
            said = _many(a, 1, color), _many(b, 1)
            out.append(make_record("one_colored", [colored, plain], " and ".join(said), False))
            said = said[::-1]
            out.append(make_record("one_colored", [plain, colored], " and ".join(said), False))
    return out


def rephrased(record: Record) -> Record:
    """Say a benchmark record in words that no benchmark prompt uses; it then is a `phrasing`."""
    task, include = record["tag"], record["include"]
    names = [f"{wish.get('color', '')} {wish['class']}".strip() for wish in include]
    if task == "counting":
        names = [_many(include[0]["class"], include[0]["count"])]
    if task == "position":
        names = [*names[::-1], include[1]["position"][0]]
    text = _PHRASINGS[task].format(*names)
    return {**record, "tag": "phrasing", "prompt": text}


def combinations() -> list[Record]:
    """Held-out coloured shapes twice, and in a relation to a plain shape."""
    out = []
    for shape, color in sorted(HELD_COLORED):
        two = [entry(shape, 2, color)]
        out.append(make_record("combination", two, _many(shape, 2, color), True))
        for other, relation in itertools.product(CLASSES, RELATIONS):
            if other != shape:
                include = [entry(other), entry(shape, color=color, position=(relation, 0))]
                text = f"a {color} {shape} {relation} a {other}"
                out.append(make_record("combination", include, text, True))
    return out


def crossings() -> list[Record]:
    """Colour with count, colours with a relation, and a pair of which one is counted."""
    out = []
    for (shape, color), number in itertools.product(_FREE, NUMBERS):
        include = [entry(shape, number, color)]
        out.append(make_record("crossing", include, _many(shape, number, color), False))
    for (a, first), (b, second) in itertools.permutations(_FREE, 2):
        for relation in RELATIONS if a != b and first != second else ():
            include = [entry(b, color=second), entry(a, color=first, position=(relation, 0))]
            text = f"a {first} {a} {relation} a {second} {b}"
            out.append(make_record("crossing", include, text, False))
    for a, b in itertools.permutations(CLASSES, 2):
        text = f"{_many(a, 2)} and {_many(b, 1)}"
        out.append(make_record("crossing", [entry(a, 2), entry(b)], text, False))
    return out
