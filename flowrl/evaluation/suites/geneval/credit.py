"""Flow-GRPO's partial credit for GenEval's records, which is what policies are trained on
(2505.05470; yifan123/reward-server, gen_eval.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flowrl.evaluation.suites.geneval.objects import Colors, DetectedObject, Objects
from flowrl.evaluation.suites.geneval.rules import position_problem


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
        credits += earned if below_zero else [max(0.0, value) for value in earned]
        groups.append(mine if right else None)
    exact = all(group is not None for group in groups)
    return Credit(sum(credits) / len(credits) if credits else 0.0, exact)


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
            return earned + ([0.0, 1.0] if wrong_place_pays and not lost else [0.0]), False
        earned.append(1.0)
    return earned, True
