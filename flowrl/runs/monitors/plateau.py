"""No held-out gain for several evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flowrl.config.monitors import PlateauMonitor
from flowrl.runs.best import Row, best_first, score_of


class Alarm(NamedTuple):
    """What is wrong, with its numbers, and what to change: a sentence each."""

    what: str
    advice: str


def plateau(options: PlateauMonitor, rows: Sequence[Row]) -> Alarm | None:
    """Say so if the last `patience` evaluations have brought no gain."""
    since = since_gain(rows, options.min_gain)
    if since < options.patience:
        return None
    name, last = rows[-1]["score"], score_of(rows[-1])
    best = best_first(rows)[0]
    gain = f" of more than {options.min_gain:g}" if options.min_gain else ""
    return Alarm(
        f"no gain{gain} of the held-out {name} in {since} evaluations: {last:.3f} after "
        f"{rows[-1]['iteration']} iterations, {score_of(best):.3f} after {best['iteration']}",
        "More iterations of the same will hardly help: take the best checkpoint, lower "
        "optimizer.lr, or give it more prompts or a larger group",
    )


def since_gain(rows: Sequence[Row], min_gain: float) -> int:
    """Count the evaluations since the score last rose by more than `min_gain` above all before.

    Only those of the last one's score count. Small gains add up: the height to beat is that of the
    last gain.
    """
    top, since = -float("inf"), 0
    for row in rows:
        score = score_of(row) if row.get("score") == rows[-1].get("score") else None
        if score is None:
            continue
        if score > top + min_gain:
            top, since = score, 0
        else:
            since += 1
    return since
