"""What the demonstration measured, as tables for the README, docs/shapes.md and the base model's
card.

The sources are assets/results/demonstration.json, which `demonstration/demonstration.py` makes, and
trained-checks.json, of other prompts, by `demonstration/trained_checks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, fixed, percent, points

from flowrl.core.prompts import load_prompts, scenes_of
from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
PAGES = ("README.md", "docs/shapes.md", "assets/shapes-sd3/README.md")
NAMES = {
    "base": "base model",
    "base_best_guidance": "base model, its best guidance and steps",
    "base_best_of_8": "base model, best of 8 by the reward",
    "rl": "after training",
    "rl_best_guidance": "after training, its best guidance and steps",
}
RUNS = ("rl", "rl_best_guidance")
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
"""Tasks of the two lists, in the order of the page."""
Result = dict[str, Any]


def read(name: str) -> Result:
    """Read a result file."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


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
    """Show word order and diversity, and gains over prompts and over scenes."""
    rows = [["", *NAMES.values()]]
    for task, words in (("position", "relation"), ("color_attr", "colours")):
        counts = [result["word_order"][key][task] for key in NAMES]
        said = [f"{count['asked']} / {count['opposite']}" for count in counts]
        rows.append([f"{words}: asked / opposite", *said])
    spreads = [result[key]["diversity"] for key in NAMES]
    for key, words in (("places", "places, pixels"), ("colors", "colours, as many as")):
        rows.append([words, *(fixed(one[key]) if one else "–" for one in spreads)])
    # the wordings of a scene are often right together, so over scenes intervals are wider
    gains = [["gain in points, 95 % interval", *(NAMES[key] for key in RUNS)]]
    for key in ("base", "base_best_guidance", "base_best_of_8"):
        some = [result[f"{run}_minus_{key}"] for run in RUNS]
        gains.append([f"over: {NAMES[key]}", *map(gain, some)])
    for key in ("base", "base_best_guidance"):
        over = [gain(over_scenes(result, run, key)) for run in RUNS]
        gains.append([f"the same over scenes: {NAMES[key]}", *over])
    return f"{markdown_table(rows)}\n\n{markdown_table(gains)}"


def over_scenes(result: Result, one: str, other: str) -> Result:
    """Average a gain over each scene's wordings, then as `crossed` does."""
    prompts = load_prompts(ROOT / result["base"]["prompts"])
    tags = [str(record["tag"]) for record in prompts.records]
    keys = [*zip(tags, scenes_of(prompts), strict=True)]
    known = list(dict.fromkeys(keys))
    places = np.array([known.index(key) for key in keys])
    gaps = shares(result[one]["outcomes"]) - shares(result[other]["outcomes"])
    means = np.stack([gaps[:, places == i].mean(1) for i in range(len(known))], 1)
    return crossed(means, [tag for tag, _ in known])


def shares(outcomes: Sequence[str]) -> np.ndarray:
    """Return the share of right images per seed and prompt [S, P] of outcomes, a text of 0 and 1
    for each prompt of a seed."""
    rows = []
    for seed in outcomes:
        rows.append([images.count("1") / len(images) for images in seed.split()])
    return np.array(rows)


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


# ---------------------------------------------------------------------------------- other prompts


def others(result: Result) -> str:
    """Show harder prompts and those out of distribution, before and after training."""
    heads = {
        "base": "base model",
        "base_best_guidance": "base model, guidance",
        "rl": "after training",
        "rl_minus_base": "gain",
        "rl_minus_base_best_guidance": "gain over guidance",
    }
    rows = [["right images", *heads.values()]]
    for name, label in LISTS.items():
        found = result["lists"][name]
        rows.append([label, *(cell(key, found[key]) for key in heads)])
        for task, words in TASKS.items():
            if task in found["base"]["tasks"]:
                rows.append([words, *(cell(key, found[key]["tasks"][task]) for key in heads)])
    return markdown_table(rows)


def cell(key: str, one: Result) -> str:
    """Write a share, or a gain."""
    return gain(one) if "minus" in key else percent(one["mean"])


PARTS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "demonstration: short": ("demonstration", short),
    "demonstration: tasks": ("demonstration", tasks),
    "demonstration: more": ("demonstration", more),
    "demonstration: card": ("demonstration", card),
    "demonstration: other prompts": ("trained-checks", others),
}
"""Mark -> its result file, and what stands behind it."""


def filled(text: str) -> str:
    """Fill every place of a text that names a part."""
    for mark, (file, part) in PARTS.items():
        if f"<!-- {mark} -->" in text:
            text = between(text, mark, "demonstration: end", [part(read(file))])
    return text


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what the demonstration measured, each with what fills it."""
    return [(ROOT / page, filled) for page in PAGES]
