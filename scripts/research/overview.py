"""What each method gained on shapes, in one table: docs/results.md.

`python scripts/research/tables.py` writes it. One row for each config that was compared on the
present base model: of several comparisons the one that `verified.py` names for it.
The gain and its interval are the comparison's own; what lies between the config and guidance comes
from the base model's evaluations beside it, as in `alone_docs.py`. The demonstration's row is from
demonstration.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from alone_docs import GROUPS, by_prompt, seeds_of
from figures import percent, points
from later import LATER, Later
from measured import between
from verified import levels

from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
PAGE = ROOT / "docs" / "results.md"
TEST = "on the test prompts"
HEAD = ["config", "gain", "95 % interval", "right images", "against guidance", "NFE", "iterations"]
Result = dict[str, Any]


class Row(NamedTuple):
    """What a comparison says of one config."""

    gain: float
    cells: list[str]


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page, with what fills it."""
    return [(PAGE, filled)]


def filled(text: str) -> str:
    """Put both tables between their marks."""
    rows = [row_of(one, name) for one, name in chosen() if one.where.startswith(TEST)]
    mine = [row for row in rows if "four steps" not in row.cells[-1]]
    mine.append(demonstrated())
    text = between(text, "overview: table", "overview: end", [drawn(mine)])
    others = [row_of(one, name) for one, name in chosen() if not one.where.startswith(TEST)]
    others += [row for row in rows if "four steps" in row.cells[-1]]
    return between(text, "overview, others: table", "overview, others: end", [drawn(others, True)])


def drawn(rows: list[Row], where: bool = False) -> str:
    """Draw rows, the largest gain first; `where` adds the column of what they were judged on."""
    head = [*HEAD, "seeds", "judged on"]
    some = [row.cells for row in sorted(rows, key=lambda row: -row.gain)]
    width = len(head) if where else len(head) - 1
    return markdown_table([head[:width], *(cells[:width] for cells in some)])


def chosen() -> list[tuple[Later, str]]:
    """List each config with the comparison that counts for it: (comparison, config)."""
    known = {one.file: one for one in LATER}
    tried = ((config, found.results or "") for config, found in levels().items())
    return [(known[file], config) for config, file in tried if file in known]


def row_of(one: Later, config: str) -> Row:
    """Read a comparison's row of a config."""
    result = read(one.file)
    entry = next(each for each in result["configs"] if each["file"] == config)
    end = entry["summary"]["nfe"]
    mean, low, high = end["gain"]
    span = "–" if low is None else f"{points(low)} to {points(high)}"
    star = "*" if end["beats_base"] else ""
    where = one.where.split(", at ")[0].removeprefix("on ")
    cells = [f"`{config}`", points(mean) + star, span, percent(end["mean"])]
    cells += [against(result, entry, one.file), f"{result['budgets']['nfe']:,.0f}"]
    return Row(mean, [*cells, f"{end['iteration']:.0f}", str(end["seeds"]), where])


def against(result: Result, entry: Result, file: str) -> str:
    """Say how far a config is from the base model with guidance, in points; "–" if that was not
    judged on the same prompts from the same noise."""
    stem = file.removesuffix(".json")
    group = next((group for group in GROUPS if stem in group.comparisons), None)
    if group is None:
        return "–"
    guided = by_prompt(read(f"{group.alone}-guided.json"), result["base"]["tags"])
    seen = crossed(seeds_of(entry) - guided, result["base"]["tags"])
    return points(seen["mean"])


def demonstrated() -> Row:
    """Read the demonstration's row."""
    found = read("demonstration.json")
    gain, over = found["rl_minus_base"], found["rl_minus_base_best_guidance"]
    low, high = map(points, gain["interval"])
    steps = np.median([run["iterations"][-1] for run in found["curves"]["runs"]])
    cells = ["`shapes/awm`, the demonstration", points(gain["mean"]) + "*"]
    cells += [f"{low} to {high}", percent(found["rl"]["mean"])]
    cells += [points(over["mean"]), "–", f"{steps:.0f}", str(found["rl"]["seeds"])]
    return Row(gain["mean"], [*cells, "the test prompts"])


def read(file: str) -> Result:
    """Read a result file."""
    return dict(json.loads((RESULTS / file).read_text(encoding="utf-8")))
