"""Evaluations that a run made with another score or another setting, before its config was changed:
what is compared over a run must have been judged alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.config.load import Config
from flowrl.config.overrides import parse_yaml
from flowrl.config.sections import EvalConfig
from flowrl.core.prompts import PromptSet, prompts_hash
from flowrl.core.types import FlowModel
from flowrl.runs.best import score_of
from flowrl.runs.evaluate import guidance_of
from flowrl.runs.folder import (
    EARLIER_EVALS,
    Rows,
    RunPath,
    read_object,
    read_rows,
    write_evals,
)
from flowrl.training.checkpoint import STATE

_SINGLE = {"best_of": 1, "best_by": ""}  # what a setting leaves out where one image is drawn


def with_weights(rows: Rows, place: Path) -> Rows:
    """Return evaluations with the weights that they judged. Those of earlier versions do not say
    so: they judged what the config in the checkpoint `place` names, or else the default."""
    if all("weights" in row.get("setting", {}) for row in rows):
        return rows
    where, then = place / STATE, EvalConfig().weights
    config = parse_yaml(str(read_object(place, STATE).get("config", "")), str(where))
    section = config.get("eval") if isinstance(config, Mapping) else None
    known = {"weights": section.get("weights", then) if isinstance(section, Mapping) else then}
    return [{**row, "setting": {**known, **row.get("setting", {})}} for row in rows]


def parted(rows: Rows, model: FlowModel, c: Config, prompts: PromptSet) -> tuple[Rows, Rows]:
    """Part a run's evaluations into those that are made as a config's `eval` section says now, by
    iteration and each once, and the others. One without a number as its score is of the others."""
    wanted = _wanted(model, c, prompts)
    alike: dict[int, dict[str, Any]] = {}
    others = []
    for row in rows:
        score = score_of(row)
        judged = row.get("score") == c.headline and score is not None and math.isfinite(score)
        if judged and not _changed_settings(row, wanted):
            alike.setdefault(row["iteration"], row)
        elif row not in others:
            others.append(row)
    return [alike[iteration] for iteration in sorted(alike)], others


def _changed_settings(row: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say what of an evaluation's setting is another one now; earlier versions knew fewer keys."""
    had = {**_SINGLE, **row.get("setting", {})}
    found = []
    for key, value in wanted.items():
        if key in had and had[key] != value:
            found.append(f"{key} {had[key]!r} -> {value!r}")
    return found


def why(rows: Rows, model: FlowModel, c: Config, prompts: PromptSet) -> str:
    """Say in a few words what differs between evaluations that were set aside and the config."""
    wanted = _wanted(model, c, prompts)
    said: dict[str, None] = {}
    for row in rows:
        if row.get("score") != c.headline:
            said[f"score {row.get('score')!r} -> {c.headline!r}"] = None
        elif score_of(row) is None:
            said["no score"] = None
        said |= dict.fromkeys(_changed_settings(row, wanted))
    return ", ".join(said)


def set_aside(run: RunPath, rows: Rows) -> None:
    """Add evaluations to the file of those that count no longer. Raises RunError."""
    write_evals(run, [*read_rows(run, EARLIER_EVALS), *rows], EARLIER_EVALS)


def _wanted(model: FlowModel, c: Config, prompts: PromptSet) -> dict[str, Any]:
    """Return what an evaluation's setting would be now; how many images go through the network at
    once is no part of what is judged."""
    height, width = c.eval_size
    return {
        "height": height,
        "width": width,
        "steps": c.eval.steps,
        "images": c.eval.images,
        "seed": c.eval.seed,
        "tuned": c.eval.tuned,
        "weights": c.eval.weights,
        "best_of": c.eval.best_of,
        "best_by": (c.eval.best_by or c.headline) if c.eval.best_of > 1 else "",
        "prompts_hash": prompts_hash(prompts),
        **guidance_of(model, c),
    }
