"""GenEval's verdict on what was found on an image, every branch of it (Ghosh et al. 2023,
djghosh13/geneval, evaluate_images.py), its result lines, and their summary.

`credit` is Flow-GRPO's partial credit for the same records, which is what policies are trained on
(2505.05470; yifan123/reward-server, gen_eval.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from flowrl.core.errors import DataError
from flowrl.core.prompt_lists import COLORS, RELATIONS
from flowrl.evaluation.suites.geneval.objects import Box, Colors, DetectedObject, Objects

POSITION_THRESHOLD = 0.1

_KEYS = {"class", "count", "color", "position"}


class ImageVerdict(NamedTuple):
    """Whether an image is right, and what is wrong with it, a line each."""

    correct: bool
    reason: str


def judge(objects: Objects, record: Mapping[str, Any], colors: Colors) -> ImageVerdict:
    """Judge the objects of an image by a valid record.

    An `include` entry looks at its `count` most confident objects of the class. Colour comes before
    position; a relation has to hold between each of them and each object of the entry that it
    points to, and that entry must have been right itself. More objects than asked for are fine. An
    `exclude` entry counts all objects of its class.
    """
    wrong: list[str] = []
    groups: list[list[DetectedObject] | None] = []
    for entry in record.get("include", []):
        mine = objects.get(entry["class"], [])[: entry["count"]]
        problem = _problem(entry, mine, groups, colors)
        if problem:
            wrong.append(problem)
        groups.append(None if problem else mine)
    for entry in record.get("exclude", []):
        number = len(objects.get(entry["class"], []))
        if number >= entry["count"]:
            wrong.append(f"expected {entry['class']}<{entry['count']}, found {number}")
    return ImageVerdict(not wrong, "\n".join(wrong))


def _problem(
    entry: Mapping[str, Any],
    mine: list[DetectedObject],
    groups: list[list[DetectedObject] | None],
    colors: Colors,
) -> str:
    """Say what is wrong with an entry's objects; "" if nothing is."""
    name, count = entry["class"], entry["count"]
    if len(mine) < count:
        return f"expected {name}>={count}, found {len(mine)}"
    if "color" in entry:
        seen = colors(name, mine)
        if seen.count(entry["color"]) < count:
            return color_problem(entry, seen)
    if "position" in entry:
        return position_problem(entry, mine, groups)
    return ""


def color_problem(entry: Mapping[str, Any], seen: list[str]) -> str:
    """Say which colours were seen in place of the one that was asked for."""
    asked = entry["color"]
    every = ", ".join(f"{seen.count(color)} {color}" for color in COLORS if color in seen)
    return (
        f"expected {asked} {entry['class']}>={entry['count']}, found {seen.count(asked)} {asked}; "
        f"and {every}"
    )


def position_problem(
    entry: Mapping[str, Any], mine: list[DetectedObject], groups: list[list[DetectedObject] | None]
) -> str:
    """Say where an entry's objects stand, if any of them is not where it should be; "" if none."""
    relation, place = entry["position"]
    target = groups[place]
    if target is None:
        return f"no target for {entry['class']} to be {relation}"
    for one in mine:
        for other in target:
            there = relations(one.box, other.box)
            if relation not in there:
                found = " and ".join(sorted(there))
                return f"expected {entry['class']} {relation} target, found {found} target"
    return ""


def relations(a: Box, b: Box) -> set[str]:
    """Return how box `a` stands to box `b`: none, one or two of left of, right of, above, below.

    The offset of the centres is shrunk by a tenth of both extents, then divided by the length of
    the offset as it was.
    """
    shift, shrunk = [], []
    for axis in (0, 1):
        extent = abs(a[axis + 2] - a[axis]) + abs(b[axis + 2] - b[axis])
        offset = (a[axis] + a[axis + 2] - b[axis] - b[axis + 2]) / 2
        left = max(abs(offset) - POSITION_THRESHOLD * extent, 0.0)
        shift.append(offset)
        shrunk.append(math.copysign(left, offset))
    if all(abs(part) < 1e-3 for part in shrunk):
        return set()
    length = math.hypot(*shift)
    right, down = (part / length for part in shrunk)
    held = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5}
    held["below"] = down > 0.5
    return {name for name, holds in held.items() if holds}


def validate_record(
    record: Any, where: str, classes: Collection[str] | None = None, colors: Collection[str] = ()
) -> None:
    """Refuse a record that cannot be judged: DataError naming `where`.

    `classes`: those that the detector knows; None = it finds whatever is named. `colors`: those
    that can be told apart; by default GenEval's ten.
    """
    entries: dict[str, Any] = {}
    for key in ("include", "exclude"):
        entries[key] = record.get(key, []) if isinstance(record, dict) else None
        if not isinstance(entries[key], list):
            raise DataError(
                f"{where}: expected a GenEval record with a list as {key!r}, got {record!r:.200}"
            )
    if not entries["include"] and not entries["exclude"]:
        raise DataError(
            f"{where}: expected a GenEval record with `include` or `exclude`: one that asks for "
            f"nothing is right on any image; got {record!r:.200}"
        )
    for key, rows in entries.items():
        for index, entry in enumerate(rows):
            _validate_entry(entry, f"{where}, {key}[{index}]", index, classes, colors or COLORS)


def _validate_entry(
    entry: Any, where: str, index: int, classes: Collection[str] | None, colors: Collection[str]
) -> None:
    # the class and how many
    if not isinstance(entry, dict) or set(entry) - _KEYS or not isinstance(entry.get("class"), str):
        raise DataError(
            f"{where}: expected an object with `class` and keys of {sorted(_KEYS)}, got "
            f"{entry!r:.200}"
        )
    if classes is not None and entry["class"] not in classes:
        raise DataError(
            f"{where}: the detector knows no class {entry['class']!r}, but {len(classes)} others: "
            f"{', '.join(sorted(classes)):.300}; give prompts of these (--prompts, or `prompts` in "
            "the config), or take `detector: owl`, which finds any"
        )
    count = entry.get("count")
    if type(count) is not int or count < 1:
        raise DataError(f"{where}: `count`: expected a whole number from 1, got {count!r}")
    # what is asked of it
    if "color" in entry and entry["color"] not in colors:
        raise DataError(f"{where}: `color`: expected one of {list(colors)}, got {entry['color']!r}")
    if "position" not in entry:
        return
    position = entry["position"]
    good = isinstance(position, list | tuple) and len(position) == 2 and position[0] in RELATIONS
    if not good or type(position[1]) is not int or not 0 <= position[1] < index:
        raise DataError(
            f"{where}: `position`: expected [one of {list(RELATIONS)}, place of an earlier entry], "
            f"got {position!r}"
        )


class Credit(NamedTuple):
    """What an image earns: a mean of credits, and whether everything is exactly as asked for."""

    score: float  # 1 where all is right; in [0, 1], or below with `below_zero`
    exact: bool  # counts are equal, not only reached; `exclude` is not looked at


def credit(
    objects: Objects,
    record: Mapping[str, Any],
    colors: Colors,
    *,
    below_zero: bool = False,
    wrong_place_pays: bool = False,
) -> Credit:
    """Average the credits of a record's `include` entries.

    An entry earns 1 - |n - found| / n for its count, with all objects of the class. Only where the
    count is right its colour earns 1 - |n - of that colour| / n, and only where all have the colour
    its position earns 1 or 0; where the count is wrong, colour and position together earn one 0.

    **Differs:** the code has two slips, here options that are off. `below_zero`: a count credit
    goes below 0 when there are more than twice as many objects as asked for. `wrong_place_pays`: a
    wrong relation earns a 0 and a 1.
    """
    credits: list[float] = []
    groups: list[list[DetectedObject] | None] = []
    for entry in record.get("include", []):
        mine = objects.get(entry["class"], [])
        earned, right = _earned(entry, mine, groups, colors, wrong_place_pays)
        if not below_zero:
            earned = [max(0.0, value) for value in earned]
        credits += earned
        groups.append(mine if right else None)
    return Credit(sum(credits) / len(credits) if credits else 0.0, exact=None not in groups)


def _earned(
    entry: Mapping[str, Any],
    mine: list[DetectedObject],
    groups: list[list[DetectedObject] | None],
    colors: Colors,
    wrong_place_pays: bool,
) -> tuple[list[float], bool]:
    """Return the credits of one entry, and whether all of it is right."""
    # the count
    count = entry["count"]
    earned = [1 - abs(count - len(mine)) / count]
    if len(mine) != count:
        return earned + [0.0] * ("color" in entry or "position" in entry), False
    # then the colour
    if "color" in entry:
        number = colors(entry["class"], mine).count(entry["color"])
        earned.append(1 - abs(count - number) / count)
        if number != count:
            return earned, False
    # then the position
    if "position" in entry:
        if position_problem(entry, mine, groups):
            lost = groups[entry["position"][1]] is None
            earned.append(0.0)
            if wrong_place_pays and not lost:
                earned.append(1.0)
            return earned, False
        earned.append(1.0)
    return earned, True


def result_row(
    filename: str, record: Mapping[str, Any], objects: Objects, verdict: ImageVerdict
) -> dict[str, Any]:
    """Return one image's line: `metadata` and `details` are JSON inside of JSON, as GenEval writes
    them; details: class -> list of [left, top, right, bottom, confidence]."""
    details: dict[str, list[list[float]]] = {}
    for name, mine in objects.items():
        details[name] = [[*map(float, found.box), float(found.score)] for found in mine]
    return {
        "filename": filename,
        "tag": record.get("tag", "all"),
        "prompt": record["prompt"],
        "correct": verdict.correct,
        "reason": verdict.reason,
        "metadata": json.dumps(record),
        "details": json.dumps(details),
    }
