"""A held-out evaluation as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.core.tables import fixed_digits, text_table


def evaluation_table(result: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return an evaluation as a table of `width` columns: each task, the mean over tasks, seen and
    held-out prompts apart."""
    # label -> figures
    name = result["score"]
    rows = dict(result["tasks"])
    rows["mean over tasks"] = {**result, "mean": result[name]}
    rows |= {part: result[part] for part in ("seen", "held_out") if part in result}
    # a line each
    lines = [["", name, "95 % interval", "images"]]
    for label, row in rows.items():
        low, high = row["interval"]
        interval = f"{fixed_digits(low)} to {fixed_digits(high)}"
        lines.append([label, fixed_digits(row["mean"]), interval, f"{row['images']}"])
    return text_table(lines, width=width)
