"""Tell what happened in a run, from the files in its folder alone: a table, one page. No network,
no model."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from flowrl.core.errors import DataError, RunError
from flowrl.core.tables import fixed, text_table
from flowrl.runs.folder import (
    CONFIG,
    EVALS,
    FINDINGS,
    SUMMARY,
    Evaluation,
    RunPath,
    Score,
    evaluation,
    read_evals,
    read_metrics,
    read_object,
    read_rows,
)
from flowrl.runs.report.curves import curves
from flowrl.runs.report.run_grid import run_grid, sample_files

TEMPLATES = Path(__file__).with_name("templates")
UNKNOWN = Score(math.nan, math.nan, math.nan, None)
DASH = "-"


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Set the held-out score before and after training, per task and in all, as aligned plain text.

    `summary` holds two evaluations, "before" and "after", each as a line of eval.jsonl has them.
    Both see the same prompts, so their intervals do not give one for the change, and no change is
    called significant. What is not known is "-". Raises DataError if an evaluation is missing or
    malformed.
    """
    rows = _table(summary)
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


def html_report(run: RunPath) -> str:
    """Tell a run on one self-contained page: scores, curves, samples, config; nothing is loaded
    from elsewhere.

    Parts that the run lacks are left out; without summary.json the first and the last evaluation
    are compared. Raises RunError if the folder is no run or a file in it is damaged.
    """
    # what the folder holds
    folder, metrics = Path(run), read_metrics(run)
    summary = _summary(folder)
    both = "before" in summary and "after" in summary
    has_curves = bool(metrics or read_evals(run))
    has_config = (folder / CONFIG).is_file()
    # its parts; the template escapes every text
    return _template().render(
        name=folder.resolve().name,
        facts=_facts(summary, len(metrics)),
        table=_table(summary) if both else None,
        findings=read_rows(run, FINDINGS),
        curves=_base64(curves(run).savefig, dpi=130) if has_curves else None,
        samples=_base64(run_grid(run).save, optimize=True) if sample_files(run) else None,
        config=_text(folder / CONFIG) if has_config else None,
    )


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html")


# ---------------------------------------------------------------------------------------- the table


def _table(summary: Mapping[str, Any]) -> list[list[str]]:
    """Rows of texts: the head, one per task, the total."""
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
    moved = fixed(change, sign=True) if math.isfinite(change) else DASH
    counts = [DASH if side.images is None else str(side.images) for side in (before, after)]
    return [name, _cell(before), _cell(after), moved, " / ".join(dict.fromkeys(counts))]


def _cell(score: Score) -> str:
    if not math.isfinite(score.mean):
        return DASH
    known = math.isfinite(score.low) and math.isfinite(score.high)
    mean = fixed(score.mean)
    return f"{mean} [{fixed(score.low)}, {fixed(score.high)}]" if known else mean


# ------------------------------------------------------------------------------------ other parts


def _summary(folder: Path) -> dict[str, Any]:
    """Read the summary, checked; without one the first and the last evaluation stand for it."""
    if not (folder / SUMMARY).is_file():
        evals = read_rows(folder, EVALS)
        if len(evals) < 2 or evals[0]["iteration"] != 0:
            return {}
        return {"before": evals[0], "after": evals[-1]}
    found = read_object(folder, SUMMARY)
    if "before" in found and "after" in found:
        try:
            _table(found)
        except DataError as error:
            raise RunError(f"{folder / SUMMARY}: {error}") from error
    return found


def _facts(summary: Mapping[str, Any], iterations: int) -> dict[str, str]:
    """Return the headline and every plain value of the summary, as texts."""
    facts = {}
    if "before" in summary and "after" in summary:
        before, after = evaluation(summary["before"]), evaluation(summary["after"])
        moved = f"{before.total.mean:.3f} → {after.total.mean:.3f}"
        facts[f"held-out {after.name} score"] = moved
    facts["iterations logged"] = str(iterations)
    for key, value in summary.items():
        if isinstance(value, str | int | float):
            facts[key.replace("_", " ")] = _value(value)
    for line in best_line(summary):
        name, _, value = line.partition(": ")
        facts[name] = value
    return facts


def _value(value: str | int | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return format(value, ",.0f" if abs(value) >= 1000 else ".4g")


def _base64(save: Callable[..., None], **options: Any) -> str:
    """Return an image as a page can hold it: what `save` writes as PNG, in base 64."""
    buffer = io.BytesIO()
    save(buffer, format="PNG", **options)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
