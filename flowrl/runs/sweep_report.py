"""A sweep as a table and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from flowrl.core.tables import fixed_digits, text_table
from flowrl.runs.report.style import grid_along, styled


def sweep_table(result: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return a row per setting, the chosen one marked, and what the columns mean."""
    # columns: the setting, its score and gap to the chosen one, then what was measured besides
    rows = result["rows"]
    others = [name for name in rows[0]["rewards"] if name != result["score"]]
    measures, mixed = [*rows[0].get("measures", {})], ["mmhm"] if "mmhm" in rows[0] else []
    head = ["", "guidance", "steps", "lora scale", result["score"], "95 % interval"]
    lines = [[*head, "less the chosen", *others, *measures, *mixed]]
    # "less the chosen" is a paired difference on the same prompts, with its interval
    for row in rows:
        low, high = row["interval"]
        gap = row["less_than_chosen"]
        span = " to ".join(f"{end:+.3f}" for end in gap["interval"])
        chosen = row["folder"] == result["chosen"]["folder"]
        guidance = "none" if row["guidance"] is None else f"{row['guidance']:g}"
        cells = ["*" if chosen else "", guidance, str(row["steps"]), f"{row['lora_scale']:g}"]
        cells += [fixed_digits(row["score"]), f"{fixed_digits(low)} to {fixed_digits(high)}"]
        cells.append("" if chosen else f"{gap['difference']:+.3f} ({span})")
        cells += [fixed_digits(row["rewards"][name]) for name in others]
        cells += [fixed_digits(row["measures"][name]["value"]) for name in measures]
        lines.append(cells + [fixed_digits(row[name]) for name in mixed])
    setting = result["chosen"]["setting"]
    about = (
        f"* chosen by {result['by']} on {setting['prompts']} ({setting['count']} prompts, hash "
        f"{setting['prompts_hash']}), {setting['images']} images each, seed {setting['seed']}"
    )
    return "\n".join([text_table(lines, width=width), about])


@styled
def sweep_figure(result: Mapping[str, Any]) -> Figure:
    """Draw the score over guidance with its intervals, a line for each number of steps and LoRA
    scale; over steps where guidance is one."""
    # the axis across is the one that was swept; each other setting is a line
    rows = result["rows"]
    along = "guidance" if len({row["guidance"] for row in rows}) > 1 else "steps"
    other = "steps" if along == "guidance" else "guidance"
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        lines.setdefault((row[other], row["lora_scale"]), []).append(row)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    grid_along(axes)
    # error bars are drawn from the score, so they are lengths below and above it
    for (value, scale), mine in lines.items():
        mine = sorted(mine, key=lambda row: row[along] or 0)
        scores = [row["score"] for row in mine]
        below = [row["score"] - row["interval"][0] for row in mine]
        above = [row["interval"][1] - row["score"] for row in mine]
        label = f"{value} {other}" if other == "steps" else f"guidance {value}"
        label += "" if scale == 1 else f", LoRA scale {scale:g}"
        places = [row[along] or 0 for row in mine]
        axes.errorbar(places, scores, [below, above], marker="o", capsize=2, label=label)
    axes.set_xlabel(along)
    axes.set_ylabel(f"{result['score']}, 95 % interval")
    axes.legend()
    return figure
