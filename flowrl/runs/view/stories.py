"""What is known of a run, for a page that already has some of it: only what changed is sent, of a
curve only the new points."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

from flowrl.runs.folder import EVALS, METRICS, TIMING, read_rows
from flowrl.runs.report.columns import mark_of, only_new
from flowrl.runs.report.page import story
from flowrl.runs.report.samples import sample_index
from flowrl.runs.view.apart import verdict_apart
from flowrl.runs.view.listing import stamps

MOST = 4096  # characters of what a page says it has


class Stories:
    """Tell runs to as many pages as ask. Made for several threads."""

    def __init__(self) -> None:
        self._verdicts: dict[Path, tuple[Any, list[str]]] = {}
        self._lock = threading.Lock()

    def changes(self, name: str, run: Path, have: str) -> dict[str, Any]:
        """Return {"id", "parts": {part of the story: value}, "marks": {part: mark}, "panels"}.

        `have` is JSON of what the page has: {"marks": those parts, "lengths": the story's}; a part
        of which it has the mark is left out, and panels have the points that it lacks, see
        `only_new`. Raises RunError for a damaged file.
        """
        known = _known(have)
        told = {**story(run, self._verdict(run)), "id": name, "name": name}
        told["samples"] = sample_index(run)
        panels = told.pop("panels")
        # how many rows of each log the page has; none of one that was cut since
        rows, theirs = {}, {}
        for log in (METRICS, TIMING):
            rows[log] = told["lengths"][log][0]
            count, mark = known["lengths"].get(log, [0, ""])
            same = mark and mark == mark_of(read_rows(run, log), count)
            theirs[log] = count if same else 0
        for place, panel in enumerate(panels):
            if panel.get("of") in rows:
                panels[place] = only_new(panel, theirs[panel["of"]], rows[panel["of"]])
        # the other parts, as far as they changed
        marks = {part: _mark(value) for part, value in told.items()}
        parts = {part: told[part] for part in told if known["marks"].get(part) != marks[part]}
        return {"id": name, "parts": parts, "marks": marks, "panels": panels}

    def _verdict(self, run: Path) -> list[str]:
        """Return the verdict on a run, computed anew only when an evaluation came."""
        if len(read_rows(run, EVALS)) < 2:
            return []
        now = stamps(run).get(EVALS)
        with self._lock:
            if self._verdicts.get(run, (None, []))[0] != now:
                self._verdicts[run] = (now, verdict_apart(run))
            return self._verdicts[run][1]


def _known(have: str) -> dict[str, dict[str, Any]]:
    """Read what a page has; nothing of what is no such text."""
    nothing: dict[str, dict[str, Any]] = {"marks": {}, "lengths": {}}
    try:
        found = json.loads(have) if len(have) <= MOST else None
    except (ValueError, RecursionError):
        return nothing
    if not isinstance(found, dict):
        return nothing
    for key in nothing:
        if isinstance(found.get(key), dict):
            nothing[key] = found[key]
    lengths = {}
    for log, pair in nothing["lengths"].items():
        if isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int:
            lengths[log] = pair
    return {**nothing, "lengths": lengths}


def _mark(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
