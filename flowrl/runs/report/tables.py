"""The held-out score before and after training, as a table, and the best checkpoint in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flowrl.core.errors import DataError
from flowrl.core.tables import fixed_digits, text_table
from flowrl.runs.folder import Evaluation, Score, evaluation

UNKNOWN = Score(math.nan, math.nan, math.nan, None)
DASH = "-"


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Set the held-out score before and after training, per task and in all, as aligned plain text.

    `summary` holds two evaluations, "before" and "after", each as a line of eval.jsonl has them.
    Both see the same prompts, so their intervals do not give one for the change, and no change is
    called significant. What is not known is "-". Raises DataError if an evaluation is missing or
    malformed.
    """
    rows = before_after_rows(summary)
    # a rule above the last row, the total
    return text_table(rows, rules=[len(rows) - 2])


def best_line(summary: Mapping[str, Any]) -> list[str]:
    """Say which checkpoint is the best and what ended the run early, a line each; nothing of what
    the summary does not have."""
    lines, best, stopped = [], summary.get("best"), summary.get("stopped")
    if best:
        score, last = f"{best['score']:.3f}", summary["after"]["iteration"]
        later = "" if best["iteration"] == last else f", the last is {last}: --iteration last"
        lines.append(f"best checkpoint: {best['checkpoint']} (held out {score}){later}")
    if stopped:
        lines.append(
            f"stopped after {stopped['iteration']} iterations by the monitor {stopped['monitor']}: "
            f"{stopped['why']}"
        )
    return lines


def before_after_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return `before_after_table` as rows of texts: the head, one per task, the total."""
    before, after = _side(summary, "before"), _side(summary, "after")
    if before.name != after.name:
        raise DataError(
            f"expected one score before and after, got {before.name!r} and {after.name!r}"
        )
    rows = [["task", "before", "after", "change", "images"]]
    for task in dict.fromkeys([*before.tasks, *after.tasks]):
        scores = (side.tasks.get(task, UNKNOWN) for side in (before, after))
        rows.append(_table_row(task, *scores))
    return [*rows, _table_row(f"all ({before.name})", before.total, after.total)]


def _side(summary: Mapping[str, Any], side: str) -> Evaluation:
    """Return the evaluation "before" or "after". Raises DataError if it is missing or malformed."""
    if not isinstance(summary.get(side), Mapping):
        raise DataError(
            f'expected the summary to hold the evaluations "before" and "after", got no {side!r}'
        )
    try:
        return evaluation(summary[side])
    except DataError as error:
        raise DataError(f"summary, {side!r}: {error}") from error


def _table_row(name: str, before: Score, after: Score) -> list[str]:
    change = after.mean - before.mean
    moved = fixed_digits(change, sign=True) if math.isfinite(change) else DASH
    counts = [DASH if side.images is None else str(side.images) for side in (before, after)]
    return [name, _cell(before), _cell(after), moved, " / ".join(dict.fromkeys(counts))]


def _cell(score: Score) -> str:
    if not math.isfinite(score.mean):
        return DASH
    known = math.isfinite(score.low) and math.isfinite(score.high)
    mean = fixed_digits(score.mean)
    return f"{mean} [{fixed_digits(score.low)}, {fixed_digits(score.high)}]" if known else mean
