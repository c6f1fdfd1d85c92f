"""The runs below a folder, and whether something has changed in one of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flowrl.core.errors import FlowRLError
from flowrl.runs.best import score_of
from flowrl.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALS,
    METRICS,
    SAMPLES,
    SUMMARY,
    Rows,
    read_rows,
)

DEEP, MOST = 4, 500  # folders below the given one; runs
FRESH = 120.0  # seconds since the last line, after which a run no longer counts as training


def find_runs(folder: Path) -> dict[str, Path]:
    """Return {path as seen from `folder`: run folder} of all runs in and below it, sorted; links
    are not followed, and inside a run nothing is looked for."""
    found: dict[str, Path] = {}
    for here, below, files in os.walk(folder):
        path = Path(here)
        depth = len(path.relative_to(folder).parts)
        begun = CONFIG in files and ENVIRONMENT in files
        if begun or {METRICS, EVALS} & {*files}:
            found[path.relative_to(folder).as_posix()] = path
            below.clear()
        elif depth >= DEEP:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        if len(found) >= MOST:
            break
    return dict(sorted(found.items()))


def stamp(run: Path) -> str:
    """Return a text that changes whenever something is written into a run."""
    seen = []
    for path in [run, run / SAMPLES, *sorted(run.glob("*.json*")), run / CONFIG]:
        try:
            about = path.stat()
        except OSError:
            continue
        seen.append((path.name, about.st_mtime_ns, about.st_size))
    return f"{hash(tuple(seen)) & (2**63 - 1):016x}"


def summary_of(name: str, run: Path) -> dict[str, Any]:
    """Return a line of the list of runs; what cannot be read is said in it."""
    found: dict[str, Any] = {"id": name, "stamp": stamp(run), "iterations": 0, "score": None}
    try:
        metrics, evals = read_rows(run, METRICS), read_rows(run, EVALS)
    except FlowRLError as error:
        return {**found, "error": str(error), "state": "damaged"}
    if metrics:
        found["iterations"] = metrics[-1]["iteration"] + 1
        found["reward"] = metrics[-1].get("reward")
    if evals:
        scored: Rows = [row for row in evals if score_of(row) is not None]
        found["scored_by"] = evals[-1].get("score")
        found["score"] = score_of(scored[-1]) if scored else None
        found["before"] = score_of(scored[0]) if scored else None
    found["state"] = _state(run)
    return found


def _state(run: Path) -> str:
    """Say whether a run is done, still writes, or has stopped in between."""
    if (run / SUMMARY).is_file():
        return "done"
    newest = 0.0
    for name in (METRICS, EVALS, CONFIG):
        if (run / name).is_file():
            newest = max(newest, (run / name).stat().st_mtime)
    return "training" if time.time() - newest < FRESH else "stopped"
