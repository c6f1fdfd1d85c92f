"""GenEval's six tasks as prompt lists of our own: 553 prompts to test, and others to train on.

GenEval (2310.11513) draws its prompts at random; this takes the same classes, colours, counts and
relations, with as many prompts for each task, in an order of its own. **Differs:** other draws than
the published file, which `load_prompts` reads too; plurals and pairs are English ("two knives", "a
pair of scissors") where GenEval adds an s; a counting prompt draws each class and number once.

What the lists do not share are combinations: a coloured class, a class with a number, and, in
prompts without colours, a pair of classes. No prompt to train on holds one of a test prompt, in
whatever task, order or relation. So single objects are for testing only. **Differs:** Flow-GRPO
(2505.05470) leaves out of its training prompts only the test prompts, in either order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from flowrl.core.prompt_lists.order import digest, pick, shuffled

Record = dict[str, Any]

CLASSES: tuple[str, ...] = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    *("traffic light", "fire hydrant", "stop sign", "parking meter", "bench"),
    *("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe"),
    *("backpack", "umbrella", "handbag", "tie", "suitcase"),
    *("frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove"),
    *("skateboard", "surfboard", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl"),
    *("banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza"),
    *("donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet"),
    *("tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone"),
    *("microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase"),
    *("scissors", "teddy bear", "hair drier", "toothbrush"),
)
"""GenEval's names, in COCO's order."""

COCO_NAMES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's name -> COCO's, where they differ; detectors answer with COCO's."""

COLORS: tuple[str, ...] = (
    *("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"),
)
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}

_PLURALS = {
    "person": "people",
    "bus": "buses",
    "bench": "benches",
    "sheep": "sheep",
    "skis": "pairs of skis",
    "wine glass": "wine glasses",
    "knife": "knives",
    "sandwich": "sandwiches",
    "broccoli": "heads of broccoli",
    "couch": "couches",
    "computer mouse": "computer mice",
    "scissors": "pairs of scissors",
    "toothbrush": "toothbrushes",
}
_PAIRS = ("skis", "scissors")

TEST_SIZES = {
    "single_object": 80,
    "two_object": 99,
    "counting": 80,
    "colors": 94,
    "position": 100,
    "color_attr": 100,
}
"""Prompts of each task, as GenEval has them."""

TRAIN_SHARES = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
"""What of the training list is of a task, in 17ths: the tasks that base models are worst at most
often; ours."""
TRAIN_UNIT = 320
"""Training prompts for each 17th."""

_COLORED = CLASSES[1:]  # no coloured people


def test_records() -> list[Record]:
    """Return 553 records: tag, include, exclude, prompt, task by task."""
    out: list[Record] = []
    for tag, size in TEST_SIZES.items():
        out += [_record(tag, chosen) for chosen in _test_choices(tag)[:size]]
    return out


def train_records() -> list[Record]:
    """Return 5,440 records of five tasks, mixed; each of the 160 counting prompts stands there ten
    times, which keeps the tasks' shares."""
    known = {combination for record in test_records() for combination in _combined_in(record)}
    out: list[Record] = []
    for tag, share in TRAIN_SHARES.items():
        records = _free(tag, known, share * TRAIN_UNIT)
        out += list(itertools.islice(itertools.cycle(records), share * TRAIN_UNIT))
    places = shuffled(range(len(out)), "train")
    return [out[place] for place in places]


def _combined_in(record: Record) -> set[tuple[Any, ...]]:
    """Return what is combined in a record: coloured classes, a class with a number, and pairs of
    classes of the tasks without colours."""
    found: set[tuple[Any, ...]] = set()
    include = record["include"]
    for entry in include:
        if "color" in entry:
            found.add((entry["class"], entry["color"]))
        if entry["count"] > 1:
            found.add((entry["class"], entry["count"]))
    if len(include) > 1 and not found:
        found.add(tuple(sorted(entry["class"] for entry in include)))
    return found


def _free(tag: str, known: set[tuple[Any, ...]], most: int) -> list[Record]:
    """Return up to `most` records of a task that hold no combination of `known`."""
    out: list[Record] = []
    for chosen in _train_choices(tag, known):
        record = _record(tag, chosen)
        if known.isdisjoint(_combined_in(record)):
            out.append(record)
        if len(out) == most:
            break
    return out


def _test_choices(tag: str) -> list[tuple[Any, ...]]:
    """Return all that a task can ask for, shuffled."""
    pairs: Iterable[tuple[Any, ...]]
    if tag == "color_attr":
        # of each two coloured classes one pair of colours: more than enough to draw from
        pairs = itertools.combinations(_COLORED, 2)
        return [_tinted(a, b, COLORS) for a, b in shuffled(pairs, tag)]
    if tag == "position":
        pairs = itertools.combinations(CLASSES, 2)
        return [(*_turned(a, b, tag), pick([*RELATIONS], a, b)) for a, b in shuffled(pairs, tag)]
    if tag == "two_object":
        pairs = itertools.combinations(CLASSES, 2)
        return [_turned(a, b, tag) for a, b in shuffled(pairs, tag)]
    every: dict[str, Iterable[tuple[Any, ...]]] = {
        "single_object": ((name,) for name in CLASSES),
        "counting": itertools.product(CLASSES, NUMBERS),
        "colors": itertools.product(_COLORED, COLORS),
    }
    return shuffled(every[tag], tag)


def _train_choices(tag: str, known: set[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return all that a task can ask for, in an order that differs from the test list's."""
    if tag == "position":
        pairs = shuffled(itertools.permutations(CLASSES, 2), "train position")
        return [(a, b, pick([*RELATIONS], "train", a, b)) for a, b in pairs]
    if tag != "color_attr":
        return _test_choices(tag)[::-1]
    # colours that are free for each class
    out = []
    for a, b in shuffled(itertools.combinations(_COLORED, 2), "train color_attr"):
        free = [color for color in COLORS if (a, color) not in known]
        first = pick(free, "first", a, b)
        free = [color for color in COLORS if (b, color) not in known and color != first]
        second = pick(free, "second", a, b)
        out.append((a, first, b, second))
    return out


def _turned(a: str, b: str, purpose: str) -> tuple[str, str]:
    """Name two classes in one order or the other."""
    return (a, b) if digest("order", purpose, a, b)[0] % 2 else (b, a)


def _tinted(a: str, b: str, colors: tuple[str, ...]) -> tuple[str, str, str, str]:
    """Give two classes two different colours."""
    first, second = _turned(a, b, "color_attr")
    one_color = pick([*colors], "first", a, b)
    other = pick([color for color in colors if color != one_color], "second", a, b)
    return first, one_color, second, other


def _record(tag: str, chosen: tuple[Any, ...]) -> Record:
    """Make the record of a task from what was chosen for it."""
    exclude: list[Record] = []
    if tag == "counting":
        name, count = chosen
        include = [{"class": name, "count": count}]
        exclude = [{"class": name, "count": count + 1}]
        text = several(name, count)
    elif tag == "colors":
        name, color = chosen
        include = [{"class": name, "count": 1, "color": color}]
        text = one(f"{color} {name}")
    elif tag == "color_attr":
        a, first, b, second = chosen
        include = [
            {"class": a, "count": 1, "color": first},
            {"class": b, "count": 1, "color": second},
        ]
        text = f"{one(f'{first} {a}')} and {one(f'{second} {b}')}"
    elif tag == "position":
        a, b, relation = chosen
        include = [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}]
        text = f"{one(a)} {relation} {one(b)}"
    else:
        include = [{"class": name, "count": 1} for name in chosen]
        text = " and ".join(one(name) for name in chosen)
    # the keys in GenEval's order
    record: Record = {"tag": tag, "include": include}
    if exclude:
        record["exclude"] = exclude
    return {**record, "prompt": f"a photo of {text}"}


def one(name: str) -> str:
    """Say one thing: "an apple", "a red car", "a pair of skis"."""
    if name.endswith(_PAIRS):
        return f"a pair of {name}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def several(name: str, count: int) -> str:
    """Say 2 to 4 things of a class: "three wine glasses"."""
    return f"{NUMBERS[count]} {_PLURALS.get(name, f'{name}s')}"
