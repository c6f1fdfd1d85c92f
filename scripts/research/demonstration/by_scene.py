"""Take the demonstration's intervals over scenes in place of wordings.

    python scripts/research/demonstration/by_scene.py

The 136 test prompts are wordings of fewer scenes, and what is right of one wording is often right
of the others. assets/results/demonstration.json takes its intervals over prompts: they say what
other wordings of these scenes would do. Here the wordings of a scene are one value, so that the
intervals say what other scenes would do, as far as a task has others: of two shapes without
colours there are six pairs in all. Reads the outcomes of that file and writes
assets/results/demonstration-scenes.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts, scenes_of
from flowrl.evaluation.crossed_errors import crossed

ROOT = Path(__file__).resolve().parents[3]
FOUND = ROOT / "assets" / "results" / "demonstration.json"
RESULT = ROOT / "assets" / "results" / "demonstration-scenes.json"
GAINS = {
    "rl_minus_base": ("rl", "base"),
    "rl_minus_base_best_guidance": ("rl", "base_best_guidance"),
    "rl_best_guidance_minus_base_best_guidance": ("rl_best_guidance", "base_best_guidance"),
}


def shares(outcomes: Sequence[str]) -> np.ndarray:
    """Return the share of right images per seed and prompt [S, P] of outcomes, a text of 0 and 1
    for each prompt of a seed."""
    rows = []
    for seed in outcomes:
        rows.append([images.count("1") / len(images) for images in seed.split()])
    return np.array(rows)


def by_scene(values: np.ndarray, scenes: Sequence[Any], tags: Sequence[str]) -> dict[str, Any]:
    """Average values [S, P] over each scene's wordings, then as `crossed` does: its mean and
    interval, and how many scenes each task has. Raises ValueError where a task's scenes have
    unequally many wordings, since the mean would change."""
    keys = [*zip(tags, scenes, strict=True)]
    known = list(dict.fromkeys(keys))
    places = np.array([known.index(key) for key in keys])
    counts = np.bincount(places)
    for tag in dict.fromkeys(tags):
        if len({int(counts[i]) for i, key in enumerate(known) if key[0] == tag}) > 1:
            raise ValueError(f"{tag}: its scenes have unequally many wordings")
    means = np.stack([values[:, places == i].mean(1) for i in range(len(known))], 1)
    own = [tag for tag, _ in known]
    found = crossed(means, own)
    number = {tag: own.count(tag) for tag in dict.fromkeys(own)}
    return {"mean": found["mean"], "interval": found["interval"], "scenes": number}


def main() -> None:
    """Read, compute, write."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    prompts = load_prompts(ROOT / found["base"]["prompts"])
    tags = [record["tag"] for record in prompts.records]
    scenes = scenes_of(prompts)
    gains = {}
    for name, (one, other) in GAINS.items():
        difference = shares(found[one]["outcomes"]) - shares(found[other]["outcomes"])
        gains[name] = by_scene(difference, scenes, tags)
        assert abs(gains[name]["mean"] - found[name]["mean"]) < 1e-9
    head = {"from": FOUND.name, "prompts": found["base"]["prompts"]}
    write_json(RESULT, head | {"scenes": len({*scenes}), **gains})
    for name, gain in gains.items():
        print(name, gain)


if __name__ == "__main__":
    main()
