"""Which evaluation of a run is the best. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.core.files import is_finite_number

Row = Mapping[str, Any]


def score_of(row: Row) -> float | None:
    """Return the headline score of an evaluation; None where it has none, or no finite one."""
    value: Any = row.get(str(row.get("score")))
    return float(value) if is_finite_number(value) else None


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sort the evaluations after training began by score, the best first; of equals the earlier.

    Only those of the last one's score count, since a run that goes on may be given another. Those
    of a comparison, which is about the end of a budget, do not.
    """
    rows = [row for row in rows if "marks" not in row]
    if not rows:
        return []
    name = rows[-1].get("score")
    known = []
    for row in rows:
        if row["iteration"] > 0 and row.get("score") == name and score_of(row) is not None:
            known.append(row)
    return sorted(known, key=lambda row: (-(score_of(row) or 0.0), row["iteration"]))


def best_iteration(rows: Sequence[Row]) -> int | None:
    """Return the iteration of the best evaluation; None before there is one."""
    found = best_first(rows)
    return int(found[0]["iteration"]) if found else None
