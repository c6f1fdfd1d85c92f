"""Result lines in GenEval's own format, and its summary of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowrl.evaluation.suites.geneval.objects import Objects
from flowrl.evaluation.suites.geneval.rules import ImageVerdict


def result_row(
    filename: str, record: Mapping[str, Any], objects: Objects, verdict: ImageVerdict
) -> dict[str, Any]:
    """Return one image's line: `metadata` and `details` are JSON inside of JSON, as GenEval writes
    them; details: class -> list of [left, top, right, bottom, confidence]."""
    details = {
        name: [[*map(float, found.box), float(found.score)] for found in mine]
        for name, mine in objects.items()
    }
    return {
        "filename": filename,
        "tag": record.get("tag", "all"),
        "prompt": record["prompt"],
        "correct": verdict.correct,
        "reason": verdict.reason,
        "metadata": json.dumps(record),
        "details": json.dumps(details),
    }


def geneval_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize result lines as GenEval's summary_scores.py: {"overall", "tasks", "images",
    "prompts", "correct_images", "correct_prompts"}.

    Overall is the mean of the tasks' means; then the shares of correct images, and of prompts with
    any correct image.
    """
    tasks: dict[str, list[bool]] = {}
    prompts: dict[str, list[bool]] = {}
    for row in rows:
        tasks.setdefault(row["tag"], []).append(bool(row["correct"]))
        prompts.setdefault(row["metadata"], []).append(bool(row["correct"]))
    means = {tag: _mean(right) for tag, right in tasks.items()}
    return {
        "overall": _mean(means.values()),
        "tasks": means,
        "images": len(rows),
        "prompts": len(prompts),
        "correct_images": _mean(bool(row["correct"]) for row in rows),
        "correct_prompts": _mean(any(right) for right in prompts.values()),
    }


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return sum(every) / len(every) if every else 0.0
