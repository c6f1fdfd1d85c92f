"""All that a page tells of a run, as plain data, from the files in its folder alone. No network, no
model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.load import differences, flat
from flowrl.core.errors import DataError, RunError
from flowrl.core.files import read_text
from flowrl.runs.folder import (
    CONFIG,
    DOCTOR,
    ENVIRONMENT,
    EVALS,
    FINDINGS,
    HISTOGRAMS,
    SUMMARY,
    TIMING,
    RunPath,
    evaluation,
    read_evals,
    read_metrics,
    read_object,
    read_rows,
)
from flowrl.runs.report.panels import by_step, histograms, panels
from flowrl.runs.report.tables import before_after_rows, best_line

# keys of a config that say when a run looks at itself, not what it trains
LOOKS = ("eval", "samples", "checkpoint", "monitors")


def story(run: RunPath) -> dict[str, Any]:
    """Return what is known of a run but its images; what it lacks is empty.

    Without summary.json the first and the last evaluation are compared. Raises RunError if the
    folder is no run or a file in it is damaged.
    """
    # files of the run; an unfinished one has no summary yet
    folder, metrics = Path(run), read_metrics(run)
    summary, evals, timing = _summary(folder), read_evals(run), read_rows(run, TIMING)
    both = "before" in summary and "after" in summary
    config = _config(folder)
    # the keys are what the page's scripts ask for
    return {
        "name": folder.resolve().name,
        "facts": _facts(summary, len(metrics), config),
        "finished": "finished" in summary,
        "table": before_after_rows(summary) if both else [],
        "findings": read_rows(run, FINDINGS),
        "doctor": _doctor(folder, config),
        "panels": panels(metrics, evals, timing),
        "by_step": by_step(metrics),
        "histograms": histograms(read_rows(run, HISTOGRAMS)),
        "config": {key: _text(value) for key, value in config.items()},
        "environment": {key: _text(value) for key, value in _environment(folder).items()},
        "noise": str(config.get("samples.seed", "")),
    }


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
    of = config.get("train.iterations")
    facts["iterations logged"] = f"{iterations} of {of}" if of else str(iterations)
    # and the summary's plain values, under their own names
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


def _config(folder: Path) -> dict[str, Any]:
    """Read the resolved config by dotted key; {} where there is none."""
    path = folder / CONFIG
    try:
        found = yaml.safe_load(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path}: expected a mapping, got {type(found).__name__}")
    return flat(found)


def _doctor(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the doctor found before the run, and where its config was another one."""
    # most runs were never shown to the doctor
    found = read_object(folder, DOCTOR)
    if not found:
        return None
    if not _is_checkup(found):
        raise RunError(
            f"{folder / DOCTOR}: is not what `flowrl doctor --run` writes; make it anew, or delete "
            "it"
        )
    seen, sections = flat(found.get("settings", {})), found.get("sections", {})
    # settings that were changed since, but for those that do not change the training
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
        "other": other if config else [],
    }


def _is_checkup(found: Mapping[str, Any]) -> bool:
    """Say whether what a page shows of a checkup is there as texts: findings, sections with why one
    was skipped, and their tables."""
    findings, sections = found.get("findings", []), found.get("sections", {})
    if not (isinstance(found.get("settings", {}), dict) and isinstance(sections, dict)):
        return False
    rows: list[Any] = []
    for section in sections.values():
        if not isinstance(section, dict) or not isinstance(section.get("table", []), list):
            return False
        rows += section.get("table", [])
    whys = [section.get("skipped", "") for section in sections.values()]
    good = isinstance(findings, list) and all(isinstance(one, dict) for one in findings)
    good = good and all(isinstance(row, list) for row in rows)
    if not good:
        return False
    texts = [*itertools.chain.from_iterable(one.values() for one in findings), *whys]
    texts += itertools.chain.from_iterable(rows)
    return all(isinstance(text, str) for text in texts)


def _environment(folder: Path) -> dict[str, Any]:
    return read_object(folder, ENVIRONMENT)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
