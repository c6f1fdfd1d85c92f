"""What the demonstration measured, as tables for the README, docs/shapes.md and the base model's
card.

The source is assets/results/demonstration.json, which `demonstration/demonstration.py` makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import between, fixed, percent, points
from methods_figures import draw_chart
from pictures import Numbers, Picture

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "demonstration.json"
COST = ROOT / "assets" / "figures" / "demonstration-cost.png"
PAGES = ("README.md", "docs/shapes.md", "assets/shapes-sd3/README.md")
NAMES = {
    "base": "base model",
    "base_best_guidance": "base model, its best guidance and steps",
    "base_best_of_8": "base model, best of 8 by the reward",
    "rl": "after training",
    "rl_best_guidance": "after training, its best guidance and steps",
}
RUNS = ("rl", "rl_best_guidance")
ORDERS = {"position": "relation", "color_attr": "colours"}
Result = dict[str, Any]


def span(entry: Result, sign: str = "") -> str:
    """Write an interval in percent; nothing where there is none."""
    low, high = entry["interval"]
    return "" if low is None else f"{points(low, sign)} to {points(high, sign)}"


def gain(entry: Result) -> str:
    """Write a gain in points, with its interval where it has one."""
    said = points(entry["mean"])
    return f"{said} ({span(entry, '+')})" if span(entry) else said


# ------------------------------------------------------------------------------ the demonstration


def short(result: Result) -> str:
    """Show each setting with its share of right images, its interval and what an image costs."""
    rows = [["test prompts", "right images", "95 % interval", "guidance", "steps", "NFE per image"]]
    for key, name in NAMES.items():
        one = result[key]
        cells = [name, percent(one["mean"]), span(one), f"{one['guidance']:g}", str(one["steps"])]
        rows.append([*cells, str(one["cost_per_image"]["network_calls"])])
    return markdown_table(rows)


def tasks(result: Result) -> str:
    """Show each task under each setting."""
    rows = [["right images", *NAMES.values()]]
    for task in result["base"]["tasks"]:
        rows.append([task, *(percent(result[key]["tasks"][task]["mean"]) for key in NAMES)])
    rows.append(["mean over tasks", *(percent(result[key]["mean"]) for key in NAMES)])
    return markdown_table(rows)


def more(result: Result) -> str:
    """Show word order, diversity and gains."""
    rows = [["", *NAMES.values()]]
    for task in result["word_order"]["base"]:
        counts = [result["word_order"][key][task] for key in NAMES]
        said = [f"{count['asked']} / {count['opposite']}" for count in counts]
        rows.append([f"{ORDERS[task]}: asked / opposite", *said])
    spreads = [result[key]["diversity"] for key in NAMES]
    for key, words in (("places", "places, pixels"), ("colors", "colours, as many as")):
        rows.append([words, *(fixed(one[key]) if one else "–" for one in spreads)])
    gains = [["gain in points, 95 % interval", *(NAMES[key] for key in RUNS)]]
    for key in ("base", "base_best_guidance", "base_best_of_8"):
        some = [result[f"{run}_minus_{key}"] for run in RUNS]
        gains.append([f"over: {NAMES[key]}", *map(gain, some)])
    return f"{markdown_table(rows)}\n\n{markdown_table(gains)}"


def card(result: Result) -> str:
    """Show what the base model can do, for its card."""
    best = result["base_best_guidance"]
    how = f"guidance {best['guidance']:g}, {best['steps']} steps"
    rows = [["right images", "no guidance, 10 steps", how]]
    pair = (result["base"], best)
    for task in result["base"]["tasks"]:
        rows.append([task, *(percent(one["tasks"][task]["mean"]) for one in pair)])
    rows.append(["mean over tasks", *(percent(one["mean"]) for one in pair)])
    return markdown_table(rows)


# -------------------------------------------------------------------------------------- the chart


def cost_numbers(result: Result) -> Numbers:
    """Return right images in percent and what an image costs: [NFE, right, low, high]. All are of
    the same prompts and the same noise."""
    trained, base, between = {}, {}, result["costs"]
    for key, name in (("rl", "no guidance"), ("rl_best_guidance", "its best guidance and steps")):
        trained[f"awm, {name}"] = _point(result[key])
    for line, titles in LINES.items():
        some = [result["base"], *(between[title] for title in titles)]
        base[f"base model, {line}"] = [_point(one) for one in some]
    base["base model, guidance"].append(_point(result["base_best_guidance"]))
    base["base model, best of n"].append(_point(result["base_best_of_8"]))
    return {"base": base, "trained": trained}


LINES = {
    "guidance": ("guidance 3.5", "guidance 3.5, 20 steps"),
    "more steps": ("20 steps",),
    "best of n": ("best of 2", "best of 4"),
}
"""The lines of the chart, and what `costs` of the file has of each."""


def _point(one: Result) -> list[float]:
    ends = [100 * end for end in one["interval"]]
    return [one["cost_per_image"]["network_calls"], 100 * one["mean"], *ends]


def pictures() -> list[Picture]:
    """Return the chart."""
    result = json.loads(FILE.read_text(encoding="utf-8"))
    return [Picture(COST, cost_numbers(result), draw_chart)]


PARTS: dict[str, Callable[[Result], str]] = {
    "demonstration: short": short,
    "demonstration: tasks": tasks,
    "demonstration: more": more,
    "demonstration: card": card,
}
"""Mark -> what stands behind it."""


def filled(text: str) -> str:
    """Fill every place of a text that names a part."""
    result = json.loads(FILE.read_text(encoding="utf-8"))
    for mark, part in PARTS.items():
        if f"<!-- {mark} -->" in text:
            text = between(text, mark, "demonstration: end", [part(result)])
    return text


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what the demonstration measured, each with what fills it."""
    return [(ROOT / page, filled) for page in PAGES]
