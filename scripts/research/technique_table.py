"""What the paired comparisons of group techniques measured, as tables of docs/group-techniques.md.

`python scripts/research/tables.py` writes them. The sources are assets/results/techniques-toy.json
and techniques-shapes.json, which `scripts/research/techniques.py` makes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import fixed, points
from technique_list import TECHNIQUES

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "group-techniques.md"
GROUNDS = {
    "toy": "On a **toy**, a linear field of 14 numbers whose prompts ask for more or less red "
    "(`technique_toy.py`): evidence that a rule does what it says, and none about images. ",
    "shapes": "On the **shapes** validation prompts. ",
}


def found(ground: str) -> dict[str, Any] | None:
    """Read a ground's result file; None where there is none."""
    file = ROOT / "assets" / "results" / f"techniques-{ground}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def about(result: dict[str, Any]) -> str:
    """Say what was compared."""
    text = (
        f"{GROUNDS[result['ground']]}Each run spends {result['nfe']:,} network evaluations; "
        f"{result['seeds']} seeds. Each technique is compared with its control, a run of the same "
        "seed that differs in the technique alone. Control *plain* has `group_norm` and "
        "`ppo_clip`; another has beside these what the technique brings along without being it, "
        "such as a wide clip range, a tree, or groups of another size. Scores of both are of "
        "held-out prompts, in percent; their difference is in points, with the 95 % interval of "
        "Student's t; the verdict is by p after Holm's correction for all rows. Rows called *none* "
        "are no techniques: they say what such an addition gains by itself."
    )
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Lay out the techniques, the best difference first."""
    out = [["technique", "control", "held out", "control's", "difference", "95 % interval"]]
    out[0] += ["p (Holm)", "verdict"]
    known = result["controls"] | result["techniques"]
    for one in sorted(result["techniques"].values(), key=lambda one: -one["mean"]):
        score, other = (fixed(100 * one[key]) for key in ("score", "control_score"))
        control = known[one["control"]]["name"].removeprefix("none: ")
        low, high = map(points, one["interval"])
        chance = fixed(one["p_holm"], 2) if one["p_holm"] >= 0.005 else "<0.01"
        gap = points(one["mean"])
        row = [one["name"], control, score, other, gap, f"{low} to {high}", chance, one["verdict"]]
        out.append(row)
    return out


def missing(result: dict[str, Any]) -> list[str]:
    """Name the techniques of the list that a result file does not have; [] where it has all."""
    names = {one.name for key, one in TECHNIQUES.items() if key not in result["techniques"]}
    if not names:
        return []
    text = f"In the list of the comparison since, and not run yet: {'; '.join(sorted(names))}."
    return [textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)]


def page(text: str) -> str:
    """Fill the place between the marks."""
    parts = ["<!-- techniques: table -->"]
    for ground in GROUNDS:
        result = found(ground)
        if result is not None:
            parts += [about(result), markdown_table(rows(result), left=2), *missing(result)]
    if len(parts) == 1:
        parts.append("Nothing was compared yet.")
    new = "\n\n".join([*parts, "<!-- techniques: end -->"])
    marks = "<!-- techniques: table -->\n.*?<!-- techniques: end -->"
    return re.sub(marks, lambda _: new, text, flags=re.DOTALL)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List the page with what fills it."""
    return [(PAGE, page)]
