"""What the base model reaches without training, in result files."""

from __future__ import annotations

import json

from docskit import ROOT

ALONE = ("guided", "best-of-8")
"""What costs no training, by the end of the result file's name: guidance 3.5 with 20 steps, and the
best of 8 by the reward."""


def alone(start: str, seed: int, count: int, images: int = 4) -> dict[str, float]:
    """Read what the base model reaches without training -> {file: share of right images}, after a
    look at how it was measured."""
    shares = {}
    for name in ALONE:
        file = ROOT / f"assets/results/{start}-{name}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        setting = found["setting"]
        guided = name == "guided"
        assert (setting["guidance"], setting["steps"]) == ((3.5, 20) if guided else (1.0, 10))
        chosen = (setting.get("best_of", 1), setting.get("best_by", ""))
        assert chosen == ((1, "") if guided else (8, "shapes"))
        assert (setting["seed"], setting["count"], found["images"]) == (seed, count, images * count)
        shares[name] = found["strict"]
    return shares
