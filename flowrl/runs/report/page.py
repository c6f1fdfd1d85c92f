"""Runs on one page that loads nothing from elsewhere: scores, curves, samples, config; and the
table of the score before and after training. All comes from the files in the runs' folders."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from flowrl.config.load import differences, flat
from flowrl.core.errors import DataError, FlowRLError, RunError
from flowrl.core.tables import fixed_digits, text_table
from flowrl.runs.folder import (
    DOCTOR,
    ENVIRONMENT,
    EVALS,
    FINDINGS,
    HISTOGRAMS,
    SUMMARY,
    TIMING,
    Evaluation,
    RunPath,
    Score,
    check_run,
    evaluation,
    read_evals,
    read_metrics,
    read_object,
    read_rows,
    read_settings,
)
from flowrl.runs.gain import run_gain, verdict_lines
from flowrl.runs.report.columns import by_step, panels
from flowrl.runs.report.samples import BUDGET, evenly, samples

TEMPLATES = Path(__file__).with_name("templates")
SCRIPTS = ("elements.js", "charts.js", "samples.js", "story.js")


# keys of a config that say when a run looks at itself, not what it trains
LOOKS = ("eval", "samples", "checkpoint", "monitors")


UNKNOWN = Score(math.nan, math.nan, math.nan, None)
DASH = "-"


def html_report(*runs: RunPath, show_damaged: bool = False) -> str:
    """Tell runs side by side on one self-contained page; nothing is loaded from elsewhere, and the
    browser is told to refuse it.

    Parts that a run lacks are left out. With `show_damaged` one of several runs that is damaged is
    shown as such, with the reason, beside the others. Raises DataError without runs, RunError if a
    folder is no run, for a damaged file, or where no run is left.
    """
    if not runs:
        raise DataError("expected at least one run folder to report, got none")
    stories, whole, damaged = [], [], {}
    for run in runs:
        check_run(run)
        try:
            found = samples(run, budget=BUDGET // len(runs))
            stories.append({**story(run), "samples": found})
            whole.append(run)
        except FlowRLError as error:
            if not show_damaged:
                raise
            damaged[str(run)] = error
    if not stories:
        raise next(iter(damaged.values()))
    _tell_apart(stories, whole)
    script = "\n".join(source(name) for name in SCRIPTS)
    # the template escapes every text; in the data nothing can end its element
    data = json.dumps(stories, allow_nan=False).replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = " · ".join(found["name"] for found in stories)
    page = template_environment().get_template("report.html")
    return page.render(
        title=title,
        stories=stories,
        damaged=damaged,
        data=data,
        script=script,
        digest=digest,
        css=source("page.css"),
    )


def template_environment() -> jinja2.Environment:
    """Return the environment of the pages' templates: it escapes every text."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def source(name: str) -> str:
    """Return a script or a style of the pages."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _tell_apart(stories: Sequence[dict[str, Any]], runs: Sequence[RunPath]) -> None:
    """Name runs by their whole path where two folders have one name."""
    names = [found["name"] for found in stories]
    for found, run in zip(stories, runs, strict=True):
        if names.count(found["name"]) > 1:
            found["name"] = str(run)


def story(run: RunPath, verdict: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what is known of a run but its images; what it lacks is empty.

    Without summary.json the first and the last evaluation are compared. `verdict` is that of
    `verdict_of`, where it is known. Raises RunError if the folder is no run or a file in it is
    damaged.
    """
    # files of the run; an unfinished one has no summary yet
    folder, metrics = Path(run), read_metrics(run)
    summary, evals, timing = _summary(folder), read_evals(run), read_rows(run, TIMING)
    table: list[list[str]] = []
    if "before" in summary and "after" in summary:
        table = before_after_rows(summary)
    config, machine = flat(read_settings(run)), read_object(run, ENVIRONMENT)
    if verdict is None:
        verdict = verdict_of(folder)
    # the keys are what the page's scripts ask for
    return {
        "name": folder.resolve().name,
        "verdict": [*verdict],
        "facts": _facts(summary, len(metrics), config),
        "finished": "finished" in summary,
        "table": table,
        "findings": read_rows(run, FINDINGS),
        "doctor": _doctor(folder, config),
        "panels": panels(metrics, evals, timing, config),
        "by_step": by_step(metrics),
        "histograms": evenly(read_rows(run, HISTOGRAMS), 60),
        "config": {key: _text(value) for key, value in config.items()},
        "environment": {key: _text(value) for key, value in machine.items()},
        "noise": str(config.get("samples.seed", "")),
    }


def verdict_of(folder: Path) -> list[str]:
    """Say what training changed on the test prompts, and where the base model stays the best.
    Raises RunError for a damaged log."""
    return verdict_lines(run_gain(folder), folder)


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
            before_after_rows(found)
        except DataError as error:
            raise RunError(f"{folder / SUMMARY}: {error}") from error
    return found


def _facts(
    summary: Mapping[str, Any], iterations: int, config: Mapping[str, Any]
) -> dict[str, str]:
    """Return the headline and every plain value of the summary, as texts."""
    # the headline, before and after training
    facts = {}
    if "before" in summary and "after" in summary:
        before, after = evaluation(summary["before"]), evaluation(summary["after"])
        moved = f"{before.total.mean:.3f} → {after.total.mean:.3f}"
        facts[f"held-out {after.name} score"] = moved
        if math.isfinite(after.total.low) and math.isfinite(after.total.high):
            facts["95 % interval after"] = f"{after.total.low:.3f} to {after.total.high:.3f}"
    facts["iterations logged"] = str(iterations)
    if config.get("train.iterations"):
        facts["iterations logged"] += f" of {config['train.iterations']}"
    # and the summary's plain values, under their own names
    for key, value in summary.items():
        if key != "verdict" and isinstance(value, str | int | float):
            facts[key.replace("_", " ")] = _value(value)
    for line in best_line(summary):
        name, _, value = line.partition(": ")
        facts[name] = value
    return facts


def _value(value: str | int | float) -> str:
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _doctor(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the doctor found before the run, and where its config was another one."""
    # most runs were never shown to the doctor
    try:
        found = read_object(folder, DOCTOR)
    except RunError as error:
        raise RunError(f"{error}; `flowrl doctor --run` makes it anew, or delete it") from error
    if not found:
        return None
    seen, sections = flat(found.get("settings", {})), found.get("sections", {})
    # settings that were changed since, but for those that do not change the training
    other = []
    if config:
        other = [key for key in differences(seen, config) if key.partition(".")[0] not in LOOKS]
    # sections that were not looked at, and the tables that have a row below their head
    skipped = {}
    for name, section in sections.items():
        if section.get("skipped"):
            skipped[name] = str(section["skipped"])
    tables = {}
    for name in ("ratio", "gradient"):
        table = sections.get(name, {}).get("table", [])
        if len(table) > 1:
            tables[name] = table
    return {
        "findings": found.get("findings", []),
        "looked_at": [name for name in sections if name not in skipped],
        "skipped": skipped,
        "tables": tables,
        "other": other,
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value)


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Set the held-out score before and after training, per task and in all, as aligned plain text.

    `summary` holds two evaluations, "before" and "after", each as a line of eval.jsonl has them.
    Both see the same prompts, so their intervals do not give one for the change: `flowrl.runs.gain`
    does. What is not known is "-". Raises DataError if an evaluation is missing or
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
        said = f"best checkpoint: {best['checkpoint']} (held out {best['score']:.3f})"
        last = summary.get("after", {}).get("iteration")
        if best["iteration"] != last:
            said += f", the last is {last}: --iteration last"
        lines.append(said)
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
    change, moved = after.mean - before.mean, DASH
    if math.isfinite(change):
        moved = fixed_digits(change, sign=True)
    counts = dict.fromkeys((_count(before.images), _count(after.images)))
    return [name, score_cell(before), score_cell(after), moved, " / ".join(counts)]


def _count(images: int | None) -> str:
    if images is None:
        return DASH
    return str(images)


def score_cell(score: Score) -> str:
    """Write a score with its interval, "-" for one that is not known."""
    if not math.isfinite(score.mean):
        return DASH
    mean = fixed_digits(score.mean)
    if not math.isfinite(score.low) or not math.isfinite(score.high):
        return mean
    return f"{mean} [{fixed_digits(score.low)}, {fixed_digits(score.high)}]"
