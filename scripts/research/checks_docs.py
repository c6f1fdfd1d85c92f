"""What trained runs do on harder prompts and out of distribution, for docs/shapes.md.

`python scripts/research/tables.py` writes it. The source is assets/results/trained-checks.json,
which `scripts/research/demonstration/trained_checks.py` makes; without it the page says that it was
not measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from demonstrated import span
from figures import percent, points
from measured import between, wrapped

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets/results/trained-checks.json", ROOT / "docs" / "shapes.md"
LISTS = {"hard": "harder tier, test list", "out of distribution": "out of distribution"}
TASKS = {
    "same_class": "two of one class in a relation",
    "same_class_pair": "two of one class",
    "one_colored": "two objects, one with a colour",
    "three_kinds": "three kinds of objects",
    "group_position": "a group in a relation",
    "five_six": "five and six objects",
    "phrasing": "other wordings",
    "combination": "held-out coloured shapes in new places",
    "crossing": "two tasks in one prompt",
}
"""Each list's tasks in the order of the page."""
HEADS = {
    "base": "base model",
    "base_best_guidance": "base model, guidance",
    "rl": "after training",
    "rl_best_guidance": "after training, guidance",
    "rl_minus_base": "gain",
    "rl_minus_base_best_guidance": "gain over guidance",
    "rl_best_guidance_minus_base_best_guidance": "gain, both with guidance",
}
ABSENT = (
    "Trained models were not measured on these lists. The command for it is\n"
    "`python scripts/research/demonstration/trained_checks.py RUN`."
)
Result = dict[str, Any]


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page and what fills it."""
    return [(PAGE, filled)]


def filled(text: str) -> str:
    """Put the sentence and the table between their marks."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else None
    parts = [about(found), table(found), looks(found)] if found else [ABSENT]
    return between(text, "trained checks: table", "trained checks: end", parts)


def about(result: Result) -> str:
    """Say what was measured, and by which command."""
    runs, rows = result["runs"], result["lists"]["hard"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    iterations = ", ".join(str(run["iteration"]) for run in runs)
    base, after = rows["base_best_guidance"], rows["rl_best_guidance"]
    over = "seeds and prompts" if len(runs) > 1 else "prompts; one seed says nothing of others"
    return wrapped(
        f"The same after training: `{result['config'].replace('-', '/', 1)}`, training seed "
        f"{seeds}, opened at its best checkpoint by validation, iteration {iterations}; all start "
        f"from one noise. Guidance is {base['guidance']:g} in the base model and "
        f"{after['guidance']:g} after training, with {after['steps']} steps; without it there are "
        f"{rows['rl']['steps']}. The base model is judged again beside the runs, since processors "
        f"differ in rounding. Gains are in points, with 95 % intervals over {over} "
        "(`scripts/research/demonstration/trained_checks.py`, "
        "`assets/results/trained-checks.json`)."
    )


def table(result: Result) -> str:
    """Show each list, and its tasks, under each setting, and the gains."""
    rows = [["right images", *HEADS.values()]]
    for name, label in LISTS.items():
        found = result["lists"][name]
        rows.append([label, *(cell(key, found[key]) for key in HEADS)])
        for task, words in TASKS.items():
            if task in found["base"]["tasks"]:
                rows.append([words, *(cell(key, found[key]["tasks"][task]) for key in HEADS)])
    return markdown_table(rows)


def looks(result: Result) -> str:
    """Say whether training found images that templates misread."""
    keys = ("images", "blank", "right", "right_but_for_flaws")
    rows = [itemgetter(*keys)(one) for one in result["looks"]]
    images, blank, right, flawed = map(sum, zip(*rows, strict=True))
    return wrapped(
        f"Of {images:,} images of training prompts after training, without guidance, {blank} are "
        f"blank, {right:,} are right, and {flawed:,}, {percent(flawed / (right + flawed))} as "
        "many, would be but for a [flaw](#strict-verdict)."
    )


def cell(key: str, one: Result) -> str:
    """Write a share, or a gain with its interval where it has one."""
    if "minus" not in key:
        return percent(one["mean"])
    known = f" ({span(one, '+')})" if one["interval"][0] is not None else ""
    return points(one["mean"]) + known
