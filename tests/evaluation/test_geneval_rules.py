"""GenEval's rules on made-up detections, branch by branch.

Expected values: those called `recorded` are what the code of djghosh13/geneval and
yifan123/reward-server gave; the others follow from a record by hand.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from flowrl.core.errors import DataError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.suites.geneval.objects import (
    Box,
    DetectedObject,
    DetectionLimits,
    Objects,
    iou,
    kept,
)
from flowrl.evaluation.suites.geneval.rules import (
    ImageVerdict,
    credit,
    judge,
    relations,
    result_row,
    validate_record,
)
from flowrl.evaluation.suites.shapes.checker import judge_detections as shapes_judge
from flowrl.evaluation.suites.shapes.checker import shared_classes
from flowrl.evaluation.suites.shapes.detect import detect, objects_of
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render


def square(x: float, y: float, side: float = 10) -> Box:
    """A box around a place."""
    return (x - side / 2, y - side / 2, x + side / 2, y + side / 2)


# where a stands to b; recorded, but for the last three, which are mirror images
PLACES = [
    ((0, 0, 10), set()),
    ((-2, 0, 10), set()),
    ((-3, 0, 10), set()),
    ((-4, 0, 10), set()),
    ((-4.1, 0, 10), {"left of"}),
    ((-30, 0, 100), set()),
    ((-40, 0, 100), set()),
    ((-41, 0, 100), {"left of"}),
    ((-100, -60, 10), {"left of"}),
    ((-50, -50, 10), {"left of", "above"}),
    ((41, 0, 100), {"right of"}),
    ((0, 41, 100), {"below"}),
    ((50, 50, 10), {"right of", "below"}),
]


@pytest.mark.parametrize(("place", "expected"), PLACES)
def test_where_a_box_stands(place: tuple[float, float, float], expected: set[str]) -> None:
    x, y, side = place
    assert relations(square(x, y, side), square(0, 0, side)) == expected


# recorded
@pytest.mark.parametrize(
    ("b", "expected"),
    [
        ((5, 0, 15, 10), 0.375),
        ((10, 0, 20, 10), 0.047619),
        ((11, 0, 20, 10), 0.0),
        ((0, 0, 10, 10), 1.0),
    ],
)
def test_both_ends_of_a_box_are_inside(b: Box, expected: float) -> None:
    assert iou((0, 0, 10, 10), b) == pytest.approx(expected, abs=1e-6)


def at(x: float, y: float, score: float = 0.95, color: str = "red") -> DetectedObject:
    return DetectedObject(square(x, y), score, None, color)


def own(name: str, objects: list[DetectedObject]) -> list[str]:
    """Read the colour that stands on an object."""
    return [one.color or "" for one in objects]


def wish(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


def said(objects: Objects, *include: dict[str, Any], exclude: Any = ()) -> tuple[bool, str]:
    found = judge(objects, {"prompt": "p", "include": [*include], "exclude": [*exclude]}, own)
    return found.correct, found.reason


CAT, DOG = at(0, 0), at(100, 0, color="blue")

# objects, include, exclude, what GenEval says; each branch of its rules
CASES: dict[str, tuple[Objects, list[dict[str, Any]], list[dict[str, Any]], str]] = {
    "there": ({"cat": [CAT]}, [wish("cat")], [], ""),
    "absent": ({"dog": [DOG]}, [wish("cat")], [], "expected cat>=1, found 0"),
    "too few": ({"cat": [CAT]}, [wish("cat", 2)], [], "expected cat>=2, found 1"),
    "more is fine": ({"cat": [CAT, DOG]}, [wish("cat")], [], ""),
    "more is excluded": (
        {"cat": [CAT, DOG]},
        [wish("cat")],
        [wish("cat", 2)],
        "expected cat<2, found 2",
    ),
    "an absent class is not excluded": ({"cat": [CAT]}, [wish("cat")], [wish("dog")], ""),
    "colour": ({"cat": [CAT]}, [wish("cat", color="red")], [], ""),
    "another colour": (
        {"cat": [CAT]},
        [wish("cat", color="blue")],
        [],
        "expected blue cat>=1, found 0 blue; and 1 red",
    ),
    "the right colour is less sure": (
        {"cat": [CAT, DOG]},
        [wish("cat", color="blue")],
        [],
        "expected blue cat>=1, found 0 blue; and 1 red",
    ),
    "one of two has the colour": (
        {"cat": [CAT, DOG]},
        [wish("cat", 2, color="blue")],
        [],
        "expected blue cat>=2, found 1 blue; and 1 red, 1 blue",
    ),
    "in relation": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", position=["right of", 0])],
        [],
        "",
    ),
    "on the other side": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", position=["left of", 0])],
        [],
        "expected dog left of target, found right of target",
    ),
    "nothing to stand to": (
        {"dog": [DOG]},
        [wish("cat"), wish("dog", position=["left of", 0])],
        [],
        "expected cat>=1, found 0\nno target for dog to be left of",
    ),
    "a target of the wrong colour is none": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat", color="blue"), wish("dog", position=["right of", 0])],
        [],
        "expected blue cat>=1, found 0 blue; and 1 red\nno target for dog to be right of",
    ),
    "a wrong colour leaves the position out": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", color="red", position=["left of", 0])],
        [],
        "expected red dog>=1, found 0 red; and 1 blue",
    ),
    "each object to each of the target": (
        {"cat": [CAT, at(200, 0)], "dog": [DOG]},
        [wish("cat", 2), wish("dog", position=["right of", 0])],
        [],
        "expected dog right of target, found left of target",
    ),
    "only as many as asked for stand in relation": (
        {"cat": [CAT, at(200, 0)], "dog": [DOG]},
        [wish("cat"), wish("dog", position=["right of", 0])],
        [],
        "",
    ),
    "nothing asked": ({}, [], [], ""),
}


@pytest.mark.parametrize("name", CASES)
def test_each_branch_of_the_verdict(name: str) -> None:
    objects, include, exclude, reason = CASES[name]
    assert said(objects, *include, exclude=exclude) == (not reason, reason)


def test_what_counts_of_the_detections() -> None:
    """Strictly above .3, for counting above .9; at most 16 of a class; sorted; no suppression."""
    scores = [0.3, 0.9, 0.31, 0.95]
    found = {"cat": [at(0, 0, score) for score in scores], "dog": [at(0, 0, 0.2)]}

    def left(tag: str, **limits: Any) -> list[float]:
        return [one.score for one in kept(found, tag, DetectionLimits(**limits)).get("cat", [])]

    assert left("colors") == [0.95, 0.9, 0.31] and left("counting") == [0.95]
    assert left("colors", most=2) == [0.95, 0.9]
    assert "dog" not in kept(found, "colors", DetectionLimits())
    # all at one place: with suppression the most confident stays; IoU .375 is below .4
    assert left("colors", overlap=0.9) == [0.95]
    shifted = {"cat": [at(0, 0, 0.8), at(5, 0, 0.7), at(5, 0, 0.6)]}
    assert len(kept(shifted, "colors", DetectionLimits(overlap=0.4))["cat"]) == 2
    assert len(kept(shifted, "colors", DetectionLimits(overlap=0.375))["cat"]) == 1


def published(table: np.ndarray, least: float, most: int, overlap: float) -> list[int]:
    """Transcribe what evaluate_images.py keeps of one class: rows [n, 5] of box and confidence."""
    falling = np.argsort(table[:, 4])[::-1]
    waiting = [int(row) for row in falling if table[row, 4] > least][:most]
    chosen: list[int] = []
    while waiting:
        first = waiting.pop(0)
        chosen.append(first)
        if overlap != 1:
            near = [iou(tuple(table[first, :4]), tuple(table[row, :4])) for row in waiting]
            waiting = [row for row, x in zip(waiting, near, strict=True) if x < overlap]
    return chosen


@pytest.mark.parametrize("tag", ["colors", "counting"])
@pytest.mark.parametrize("overlap", [1.0, 0.5])
def test_equal_confidences_are_ordered_as_in_the_published_code(tag: str, overlap: float) -> None:
    """750 classes of up to 40 objects for each case, with few different confidences, among them
    the thresholds themselves."""
    draw, limits = np.random.default_rng(0), DetectionLimits(overlap=overlap)
    levels = np.array([0.2, 0.3, 0.5, 0.9, 0.95, 1.0], dtype=np.float32)
    for _ in range(750):
        count = int(draw.integers(1, 41))
        corner = draw.integers(0, 30, (count, 2)).astype(np.float32)
        score = draw.choice(levels, (count, 1))
        table = np.concatenate([corner, corner + 20, score], axis=1)
        found = []
        for left, top, right, bottom, sure in table.tolist():
            found.append(DetectedObject((left, top, right, bottom), sure))
        least = limits.counting if tag == "counting" else limits.threshold
        rows = published(table, least, limits.most, overlap)
        ours = kept({"cat": found}, tag, limits).get("cat", [])
        assert [*map(id, ours)] == [id(found[row]) for row in rows]


# objects, include, credit of the code, ours; the code's are recorded or follow its list of credits
CREDITS: dict[str, tuple[Objects, list[dict[str, Any]], float, float]] = {
    "right": ({"cat": [CAT]}, [wish("cat")], 1.0, 1.0),
    "three of one": ({"cat": [CAT] * 3}, [wish("cat")], -1.0, 0.0),
    "three of four": ({"cat": [CAT] * 3}, [wish("cat", 4)], 0.75, 0.75),
    "three of four, and a colour": (
        {"cat": [CAT] * 3},
        [wish("cat", 4, color="red")],
        0.375,
        0.375,
    ),
    "half of the colour": ({"cat": [CAT, DOG]}, [wish("cat", 2, color="red")], 0.75, 0.75),
    "the wrong side": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", position=["left of", 0])],
        0.75,
        2 / 3,
    ),
    "the right side": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", position=["right of", 0])],
        1.0,
        1.0,
    ),
    "no target": (
        {"dog": [DOG]},
        [wish("cat"), wish("dog", position=["right of", 0])],
        1 / 3,
        1 / 3,
    ),
    # 1, 0 for count and colour of the cat, 1 for the dog, 0 since there is no target
    "colour and target": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat", color="blue"), wish("dog", position=["right of", 0])],
        0.5,
        0.5,
    ),
    "colour and position, too few": (
        {"cat": [CAT], "dog": [DOG]},
        [wish("cat"), wish("dog", 2, color="blue", position=["right of", 0])],
        0.5,
        0.5,
    ),
}


@pytest.mark.parametrize("name", CREDITS)
def test_each_branch_of_the_credit(name: str) -> None:
    objects, include, theirs, ours = CREDITS[name]
    record = {"include": include, "exclude": [wish("cat")]}
    slips = credit(objects, record, own, below_zero=True, wrong_place_pays=True)
    assert slips.score == pytest.approx(theirs)
    mine = credit(objects, record, own)
    assert mine.score == pytest.approx(ours) and mine.exact == slips.exact == (ours == 1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a cat"}, "include. or .exclude"),
        ({"include": "cat"}, "list as 'include'"),
        ({"include": [wish("unicorn")]}, "'unicorn', but 2 others: cat, dog; give prompts"),
        ({"include": [wish("cat", 0)]}, "count"),
        ({"include": [wish("cat", True)]}, "count"),
        ({"include": [wish("cat", color="mauve")]}, "color.: expected one of"),
        ({"include": [wish("cat", position=["left of", 0])]}, "earlier entry"),
        ({"include": [wish("cat"), wish("dog", position=["beside", 0])]}, "position"),
        ({"include": [wish("cat"), wish("dog", place=1)]}, "keys"),
        ({"include": [wish("cat")], "exclude": [{"count": 2}]}, r"exclude\[0\]"),
        ([], "GenEval record"),
    ],
)
def test_a_record_that_cannot_be_judged_is_named(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        validate_record(record, "prompts.jsonl, line 3", {"cat", "dog"})
    assert str(caught.value).startswith("prompts.jsonl, line 3")


@pytest.mark.parametrize(("name", "prompts"), [("geneval/test", 553), ("geneval/train", 5440)])
def test_the_made_lists_can_be_judged(name: str, prompts: int) -> None:
    """553 prompts are GenEval's own number; the other was counted by hand from the scheme: all
    combinations that the test list has not."""
    found = load_prompts(name)
    for record, where in zip(found.records, found.places, strict=True):
        validate_record(record, where)
    assert len(found) == prompts


def test_result_lines_are_genevals() -> None:
    """Keys in its order; metadata and details are JSON in JSON."""
    record = {"tag": "colors", "include": [wish("cat")], "prompt": "a cat"}
    row = result_row("00000/samples/0000.png", record, {"cat": [CAT]}, ImageVerdict(True, ""))
    assert [*row] == ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert json.loads(row["metadata"]) == record
    assert json.loads(row["details"]) == {"cat": [[-5.0, -5.0, 5.0, 5.0, 0.95]]}


def test_on_shapes_the_rules_agree_with_the_pixel_checker() -> None:
    """Every task's scenes under their own records and under others', so that all branches answer
    both ways. The checker also wants a clean image, which is left out here."""
    records = [record for task in all_records().values() for record in task[::7]]
    records = [record for record in records if not shared_classes(record)]
    rng = np.random.default_rng(0)
    found = detect(render(scenes_for(records, rng)), find_flaws=True)
    objects = objects_of(found)
    seen = []
    for shift in (0, 1, len(records) // 2):
        asked = records[shift:] + records[:shift]
        checked = shapes_judge(found, asked)
        whole = checked.count_ok & checked.color_ok & checked.position_ok & checked.exclude_ok
        mine = [judge(o, r, own).correct for o, r in zip(objects, asked, strict=True)]
        assert mine == whole.tolist()
        seen += mine
    assert len(seen) > 200 and 0.3 < sum(seen) / len(seen) < 0.7
    assert math.isclose(sum(seen[: len(records)]), len(records))
