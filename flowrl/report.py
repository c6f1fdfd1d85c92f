"""Tell what happened in a run, from the files in its folder alone: a table, one page. No network, no model."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.curves import (
    EVALS,
    RunPath,
    Score,
    compare_curves,
    curves,
    evaluation,
    read_evals,
    read_metrics,
    read_rows,
)
from flowrl.errors import DataError, RunError
from flowrl.figures import labelled_grid, load_strip, pairs_figure, run_grid, sample_files, save_png, save_strip

__all__ = [
    "before_after_table",
    "compare_curves",
    "curves",
    "html_report",
    "labelled_grid",
    "load_strip",
    "pairs_figure",
    "run_grid",
    "save_png",
    "save_strip",
]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: 2.5rem auto;
  padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid #e4e4e4; }
dl { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 0; }
dt { color: #6e6e6e; font-size: .82rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem; text-align: right; border-bottom: 1px solid #eee; white-space: pre; }
th { color: #6e6e6e; font-weight: 500; font-size: .85rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { font-weight: 600; border-bottom: 0; border-top: 1px solid #bbb; }
p { color: #6e6e6e; font-size: .85rem; } img { max-width: 100%; height: auto; display: block; }
details { margin-top: 2.2rem; } summary { cursor: pointer; font-weight: 600; }
pre { background: #f7f7f7; padding: 1rem; overflow-x: auto; font-size: .82rem; line-height: 1.4; }
"""
# The policy makes the browser itself refuse whatever is not on the page, should a text ever slip through unescaped.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Set the held-out score before and after training, per task and in all, as aligned plain text.

    `summary` holds two evaluations, "before" and "after", each as a line of eval.jsonl has them. Both see the same
    prompts, so their intervals do not give one for the change, and no change is called significant. What is not known
    is "-". Raises DataError if an evaluation is missing or malformed.
    """
    rows = _table(summary)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        texts = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *texts]))
    rule = "-" * len(lines[0])
    head, *tasks, total = lines
    return "\n".join([head, rule, *tasks, *([rule] if tasks else []), total])


def html_report(run: RunPath) -> str:
    """Tell a run on one self-contained page: scores, curves, samples, config; nothing is loaded from elsewhere.

    Parts that the run lacks are left out; without summary.json the first and the last evaluation are compared.
    Raises RunError if the folder is no run or a file in it is damaged.
    """
    folder, metrics = Path(run), read_metrics(run)
    name, summary = html.escape(folder.resolve().name), _summary(folder)
    parts = [f"<h1>{name}</h1>", _facts(summary, len(metrics))]
    if "before" in summary and "after" in summary:
        note = "Mean score on held-out prompts, with its 95% interval in brackets."
        parts += ["<h2>Before and after</h2>", _html_table(_table(summary)), f"<p>{note}</p>"]
    if metrics or read_evals(run):
        parts += ["<h2>Curves</h2>", _picture(curves(run).savefig, "curves over the iterations", dpi=130)]
    if sample_files(run):
        parts += ["<h2>Samples</h2>", _picture(run_grid(run).save, "samples of fixed prompts", optimize=True)]
    if (folder / "config.yaml").is_file():
        config = html.escape(_text(folder / "config.yaml"))
        parts.append(f"<details><summary>Resolved configuration</summary><pre>{config}</pre></details>")
    return _PAGE.format(title=name, style=_STYLE, body="\n".join(parts))


def _table(summary: Mapping[str, Any]) -> list[list[str]]:
    """Rows of texts: the head, one per task, the total."""
    sides = {}
    for side in ("before", "after"):
        if not isinstance(summary.get(side), Mapping):
            raise DataError(f'expected the summary to hold the evaluations "before" and "after", got no {side!r}')
        try:
            sides[side] = evaluation(summary[side])
        except DataError as error:
            raise DataError(f"summary, {side!r}: {error}") from error
    before, after = sides["before"], sides["after"]
    if before.name != after.name:
        raise DataError(f"expected one score before and after, got {before.name!r} and {after.name!r}")
    unknown = Score(math.nan, math.nan, math.nan, None)
    rows = [
        _table_row(task, before.tasks.get(task, unknown), after.tasks.get(task, unknown))
        for task in dict.fromkeys([*before.tasks, *after.tasks])
    ]
    head = ["task", "before", "after", "change", "images"]
    return [head, *rows, _table_row(f"all ({before.name})", before.total, after.total)]


def _table_row(name: str, before: Score, after: Score) -> list[str]:
    change = after.mean - before.mean
    moved = f"{round(change, 3) + 0.0:+.3f}" if math.isfinite(change) else "-"  # adding 0.0 turns -0.0 into 0.0
    counts = list(dict.fromkeys("-" if side.images is None else str(side.images) for side in (before, after)))
    return [name, _cell(before), _cell(after), moved, " / ".join(counts)]


def _cell(score: Score) -> str:
    if not math.isfinite(score.mean):
        return "-"
    known = math.isfinite(score.low) and math.isfinite(score.high)
    return f"{score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]" if known else f"{score.mean:.3f}"


def _summary(folder: Path) -> dict[str, Any]:
    path, evals = folder / "summary.json", read_rows(folder, EVALS)
    if not path.is_file():
        return {"before": evals[0], "after": evals[-1]} if len(evals) > 1 else {}
    try:
        found = json.loads(_text(path))
        if not isinstance(found, dict):
            raise DataError(f"expected a JSON object, got {type(found).__name__}")
        if "before" in found and "after" in found:
            _table(found)
    except (ValueError, DataError) as error:
        raise RunError(f"{path}: {error}") from error
    return found


def _facts(summary: Mapping[str, Any], iterations: int) -> str:
    """Show the headline and every plain value of the summary."""
    facts = {"iterations logged": str(iterations)}
    if "before" in summary and "after" in summary:
        before, after = evaluation(summary["before"]), evaluation(summary["after"])
        facts = {f"held-out {after.name} score": f"{before.total.mean:.3f} → {after.total.mean:.3f}", **facts}
    for key, value in summary.items():
        if isinstance(value, str | int | float):
            digits = ",.0f" if isinstance(value, float) and abs(value) >= 1000 else ".4g"
            facts[key.replace("_", " ")] = format(value, digits) if isinstance(value, float) else str(value)
    entries = (f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>" for key, value in facts.items())
    return f"<dl>{''.join(entries)}</dl>"


def _html_table(rows: list[list[str]]) -> str:
    lines = []
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _picture(save: Callable[..., None], text: str, **options: Any) -> str:
    buffer = io.BytesIO()
    save(buffer, format="PNG", **options)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{data}">'


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
