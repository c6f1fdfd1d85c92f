"""The tables of docs/six-methods.md: six methods as published and as tuned.

`python scripts/research/tables.py` writes them. The sources are the six searches, assets/results/
tune-*.json, and the comparison, compare-six.json, with what costs no training beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from alone_docs import Group, table
from measured import between, wrapped

from flowrl.core.tables import markdown_table
from flowrl.runs.compare.summary import error_model, summarize_result
from flowrl.runs.compare.tables import aggregate_table, comparison_table, notes, task_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "assets" / "results", ROOT / "docs" / "six-methods.md"
METHODS = {
    "flow-grpo": "Flow-GRPO",
    "mix-grpo": "MixGRPO",
    "branch-grpo": "BranchGRPO",
    "diffusion-nft": "DiffusionNFT",
    "awm": "AWM",
    "diffusion-dpo": "Diffusion-DPO, online",
}
ALONE = Group("six", "compare-six", ("compare-six",))
Result = dict[str, Any]


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page, and those of the methods, with what fills each."""
    methods = ROOT / "docs" / "methods"
    result = summarize_result(read("compare-six"))
    pages = [(methods / f"{name.replace('-', '_')}.md", name) for name in METHODS]
    return [
        (PAGE, filled),
        *((page, partial(told, name=name, result=result)) for page, name in pages),
    ]


def told(text: str, name: str, result: Result) -> str:
    """Say on a method's page what its two arms gained."""
    model = error_model(result["configs"], result["base"], "nfe")
    seeds = len(result["configs"][0]["seeds"])
    gains = [span(*model.gain(f"{name}-{arm}")) for arm in ("published", "tuned")]
    said = (
        f"Gains on the shapes model in {result['budgets']['nfe']:,.0f} network evaluations, "
        f"{seeds} seeds: with its published settings {gains[0]} points, with tuned ones "
        f"{gains[1]}: "
        "[six methods](../six-methods.md#on-test-prompts)."
    )
    return between(text, f"six: {name}", f"six: {name} end", [wrapped(said)])


def filled(text: str) -> str:
    """Put all tables between their marks."""
    searches = {name: read(f"tune-{name}") for name in METHODS}
    result = summarize_result(read("compare-six"))
    said = "\n".join(wrapped(f"- {line}", "  ") for line in notes(result))
    parts = {
        "tuning": [markdown_table(tuning_rows(searches), left=3)],
        "arms": [markdown_table(arm_rows(result))],
        "alone": [table(ALONE)],
        "all": [markdown_table(comparison_table(result)), said],
        "tasks": [markdown_table(task_table(result, "nfe"))],
        "over tasks": [markdown_table(aggregate_table(result, "nfe"))],
    }
    for name, texts in parts.items():
        text = between(text, f"six, {name}: table", f"six, {name}: end", texts)
    return text


def tuning_rows(searches: dict[str, Result]) -> list[list[str]]:
    """Lay out what was tried of each method, and what the trials reached on validation prompts."""
    rows = [["method", "tried", "the best", "base", "worst trial", "best trial"]]
    for name, found in searches.items():
        tried = [f"`{key}` {', '.join(values)}" for key, values in found["choices"].items()]
        best = found["trials"][found["best"]]
        chosen = ", ".join(change.partition("=")[2] for change in in_order(found, best))
        scores = [trial["score"] for trial in found["trials"]]
        ends = found["base"]["score"], min(scores), max(scores)
        rows.append([METHODS[name], "; ".join(tried), chosen, *map(percent, ends)])
    return rows


def in_order(found: Result, trial: Result) -> list[str]:
    """Return the changes of a trial in the order of the choices."""
    place = {key: number for number, key in enumerate(found["choices"])}
    return sorted(trial["changes"], key=lambda change: place[change.partition("=")[0]])


def arm_rows(result: Result) -> list[list[str]]:
    """Set each method's two arms side by side, with the interval of their difference."""
    model = error_model(result["configs"], result["base"], "nfe")
    rows = [["method", "as published", "gain", "as tuned", "gain", "tuned less published"]]
    for name, title in METHODS.items():
        arms, cells = [f"{name}-{arm}" for arm in ("published", "tuned")], [title]
        for arm in arms:
            mean, gain = model.score(arm)[0], model.gain(arm)
            cells += [percent(mean), span(*gain)]
        rows.append([*cells, span(*model.difference(arms[1], arms[0]))])
    return rows


def span(value: float, error: Any) -> str:
    """Write a difference in points with its 95 % interval."""
    half = error.half()
    return f"{100 * value:+.1f} ({100 * (value - half):+.1f} to {100 * (value + half):+.1f})"


def percent(value: float) -> str:
    """Write a share as percent."""
    return f"{100 * value:.1f} %"


def read(name: str) -> Result:
    """Read a result file."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
