"""What the demonstration measured, as tables for the README, docs/shapes.md and the base model's
card.

`python scripts/research/tables.py` writes them, between marks. The source is
assets/results/demonstration.json, which `scripts/research/demonstration/demonstration.py` makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import fixed, percent, points

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "assets" / "results" / "demonstration.json"
NAMES = {
    "base": "base model",
    "base_best_guidance": "base model, its best guidance and steps",
    "base_best_of_8": "base model, best of 8 by the reward",
    "rl": "after training",
    "rl_best_guidance": "after training, its best guidance and steps",
}
RUNS = ("rl", "rl_best_guidance")
Result = dict[str, Any]


def span(entry: Result, sign: str = "") -> str:
    """Write an interval in percent."""
    low, high = entry["interval"]
    return f"{points(low, sign)} to {points(high, sign)}"


def nfe(entry: Result) -> int:
    """Return the NFE of an image; files in results/earlier have it under `cost_per_picture`."""
    cost = entry.get("cost_per_image") or entry["cost_per_picture"]
    return int(cost["network_calls"])


def short(result: Result) -> str:
    """Show each setting with its share of right images, its interval and what an image costs."""
    rows = [["test prompts", "right images", "95 % interval", "guidance", "steps", "NFE per image"]]
    for key, name in NAMES.items():
        one = result[key]
        rows.append(
            [
                name,
                percent(one["mean"]),
                span(one),
                f"{one['guidance']:g}",
                str(one["steps"]),
                str(nfe(one)),
            ]
        )
    return markdown_table(rows)


def tasks(result: Result) -> str:
    """Show each task under each setting."""
    rows = [["right images", *NAMES.values()]]
    for task in result["base"]["tasks"]:
        rows.append([task, *(percent(result[key]["tasks"][task]["mean"]) for key in NAMES)])
    rows.append(["mean over tasks", *(percent(result[key]["mean"]) for key in NAMES)])
    return markdown_table(rows)


def more(result: Result) -> str:
    """Show gains, word order and diversity."""
    rows = [["", *NAMES.values()]]
    for task, words in (("position", "relation"), ("color_attr", "colours")):
        counts = [result["word_order"][key][task] for key in NAMES]
        rows.append(
            [f"{words}: asked / opposite", *(f"{c['asked']} / {c['opposite']}" for c in counts)]
        )
    spreads = [result[key]["diversity"] for key in NAMES]
    for key, words in (("places", "places, pixels"), ("colors", "colours, as many as")):
        rows.append([words, *(fixed(one[key]) if one else "–" for one in spreads)])
    gains = [["gain in points, 95 % interval", *(NAMES[key] for key in RUNS)]]
    for key in ("base", "base_best_guidance", "base_best_of_8"):
        some = [result[f"{run}_minus_{key}"] for run in RUNS]
        said = [f"{points(gain['mean'])} ({span(gain, '+')})" for gain in some]
        gains.append([f"over: {NAMES[key]}", *said])
    return f"{markdown_table(rows)}\n\n{markdown_table(gains)}"


def card(result: Result) -> str:
    """Show what the base model can do, for its card."""
    best = result["base_best_guidance"]
    rows = [
        [
            "right images",
            "no guidance, 10 steps",
            f"guidance {best['guidance']:g}, {best['steps']} steps",
        ]
    ]
    pair = (result["base"], best)
    for task in result["base"]["tasks"]:
        rows.append([task, *(percent(one["tasks"][task]["mean"]) for one in pair)])
    rows.append(["mean over tasks", *(percent(one["mean"]) for one in pair)])
    return markdown_table(rows)


PARTS: dict[str, Callable[[Result], str]] = {
    "short": short,
    "tasks": tasks,
    "more": more,
    "card": card,
}


def fill(text: str, result: Result | None) -> str:
    """Fill every place of a text that names a part; nothing without a result file."""
    for name, part in PARTS.items():
        said = f"{part(result)}\n\n" if result else ""
        start, end = f"<!-- demonstration: {name} -->", "<!-- demonstration: end -->"
        head, found, rest = text.partition(f"{start}\n")
        if found:
            text = f"{head}{start}\n\n{said}{end}{rest.partition(end)[2]}"
    return text


def load() -> Result | None:
    """Read the result file; None where there is none."""
    return json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else None


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what the demonstration measured, each with what fills it."""
    pages = [ROOT / name for name in ("README.md", "docs/shapes.md", "assets/shapes-sd3/README.md")]
    return [(page, partial(fill, result=load())) for page in pages]
