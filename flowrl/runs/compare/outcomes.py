"""Outcomes per image in a result file: one short text for each evaluation.

Prompts are separated by spaces. Verdicts 0 and 1 are letters, "0110 1111"; other scores stand
between commas, "0.25,0.5 0.75,1".
"""

from __future__ import annotations

from collections.abc import Sequence


def packed(outcomes: Sequence[Sequence[float]]) -> str:
    """Write scores, one list per prompt, as a text."""
    flat = {value for some in outcomes for value in some}
    short = flat <= {0.0, 1.0}
    words = []
    for some in outcomes:
        # -0.0 equals 0.0 but would be written "-0", two letters; + 0.0 takes its sign away
        if short:
            words.append("".join(f"{value + 0.0:.0f}" for value in some))
        else:
            words.append(",".join(f"{value + 0.0:.6g}" for value in some) + ",")
    return " ".join(words)


def unpacked(text: str) -> list[list[float]]:
    """Read what `packed` wrote."""
    out = []
    for part in text.split(" "):
        letters = part.strip(",").split(",") if "," in part else part
        out.append([float(value) for value in letters])
    return out
