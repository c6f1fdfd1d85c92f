"""What the base model reaches without training, in result files and in docs/compare.md."""

from __future__ import annotations

import json

from docskit import PAGES, ROOT

ALONE = {"guided": "guidance 3.5, 20 steps", "best-of-8": "best of 8 by the reward"}
"""What costs no training, by the end of the result file's name, and how the pages call it."""


def alone(start: str, seed: int, count: int) -> dict[str, float]:
    """Read what the base model reaches without training -> {file: share of right images}, after a
    look at how it was measured and at its row in compare.md. An image costs steps x 2 with
    guidance, x 8 for the best of 8."""
    shares = {}
    for name, words in ALONE.items():
        file = ROOT / f"assets/results/{start}-{name}.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        setting, (low, high) = found["setting"], found["interval"]
        guided = name == "guided"
        assert (setting["guidance"], setting["steps"]) == ((3.5, 20) if guided else (1.0, 10))
        chosen = (setting.get("best_of", 1), setting.get("best_by", ""))
        assert chosen == ((1, "") if guided else (8, "shapes"))
        nfe = setting["steps"] * (1 if setting["guidance"] == 1 else 2) * chosen[0]
        span = f"{100 * low:.1f} to {100 * high:.1f}"
        row = f"| base model, {words} | {100 * found['strict']:.1f} % | {span} | {nfe} |"
        assert row in PAGES["docs/compare.md"], row
        assert (setting["seed"], setting["count"], found["images"]) == (seed, count, 4 * count)
        shares[name] = found["strict"]
    return shares


def base_row(score: float, low: float, high: float) -> str:
    """Write the base model's row: 10 steps without guidance."""
    return f"| base model | {100 * score:.1f} % | {100 * low:.1f} to {100 * high:.1f} | 10 |"
