"""The runs below a folder, a line for each, read anew only where a file changed: of a log its end.
No torch, no numpy."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.core.errors import RunError
from flowrl.core.files import finite_or_none
from flowrl.runs.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALS,
    METRICS,
    RESULT,
    SAMPLES,
    SUMMARY,
    TIMING,
    Evaluation,
    Rows,
    is_locked,
    parse_rows,
    read_bytes,
    read_evals,
    read_object,
    read_rows,
    read_settings,
)

DEEP, MOST = 4, 500  # folders below the given one; runs
RECENT = 20  # iterations whose time says how long those to come take
LOOK = 1.0  # seconds for runs that were never read, in one answer
TAIL = 2**18  # bytes of a log that are looked at


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


Stamps = dict[str, tuple[int, int]]


def stamps(run: Path) -> Stamps:
    """Return {file: (time of the last change in ns, bytes)} of what a run says of itself."""
    found = {}
    try:
        inside = [*os.scandir(run)]
    except OSError:
        return {}
    for entry in inside:
        if entry.name.endswith((".json", ".jsonl")) or entry.name in (CONFIG, SAMPLES):
            try:
                about = entry.stat()
            except OSError:  # another process may just have taken it away
                continue
            found[entry.name] = (about.st_mtime_ns, about.st_size)
    return dict(sorted(found.items()))


def stamp(found: Stamps) -> str:
    """Return a text that changes whenever something is written into a run."""
    return f"{hash(tuple(found.items())) & (2**63 - 1):016x}"


def state_of(run: Path) -> str:
    """Say whether a run is training, done, or has stopped in between: a process holds its folder,
    or what is written at the end is there, or neither."""
    if is_locked(run):
        return "training"
    if any((run / name).is_file() for name in (SUMMARY, RESULT)):
        return "done"
    return "stopped"


def last_rows(run: Path, name: str, most: int) -> Rows:
    """Return the last rows of a log, of those in its last `TAIL` bytes. Raises RunError for a
    damaged one."""
    path, start = run / name, 0
    if path.is_file():
        start = max(0, path.stat().st_size - TAIL)
    lines = read_bytes(path, start).splitlines(keepends=True)
    if start:  # in the middle of a line
        del lines[:1]
    try:
        return parse_rows(lines[-most - 1 :], path)[-most:]
    except RunError:
        read_rows(run, name)  # says which line it is
        raise


class _Watched:
    """A run, and what was last said of it."""

    def __init__(self, name: str, run: Path) -> None:
        self.name, self.run = name, run
        self.seen: Stamps = {}
        self.said: dict[str, Any] = {}

    def line(self) -> dict[str, Any]:
        """Return the run's line in the list; what cannot be read is said in it."""
        now = stamps(self.run)
        if now != self.seen or not self.said:
            try:
                self.said = {**self._begun(now), **_told(self.run)}
            except Exception as error:  # whatever is in its files, the others are shown
                self.said = {**self._begun(now), "error": str(error)}
            self.seen = now
        if "error" in self.said:
            return {**self.said, "state": "damaged"}
        line = {**self.said, "state": state_of(self.run)}
        if line["state"] != "training":
            line["seconds_left"] = None
        return line

    def unread(self) -> dict[str, Any]:
        """Return the line of a run whose logs were not looked at yet."""
        return {**self._begun({}), "state": state_of(self.run), "reading": True}

    def _begun(self, now: Stamps) -> dict[str, Any]:
        return {"id": self.name, "stamp": stamp(now), "iterations": 0, "score": None}


def _told(run: Path) -> dict[str, Any]:
    """Read a run -> the parts of its line. Raises FlowRLError for what is damaged."""
    read_object(run, SUMMARY)
    wanted, evals = _iterations(run), read_evals(run)
    found: dict[str, Any] = {"wanted": wanted, "sample": newest_sample(run)}
    for row in last_rows(run, METRICS, 1):
        found["iterations"] = row["iteration"] + 1
        found["reward"] = finite_or_none(row.get("reward"))
    # the whole iterations that are left, at the speed of the last ones
    found["seconds_left"] = None
    times = [row["total"] for row in last_rows(run, TIMING, RECENT) if row.get("total") is not None]
    left = (wanted or 0) - found.get("iterations", 0)
    if times and left > 0:
        found["seconds_left"] = finite_or_none(left * sum(times) / len(times))
    return {**found, **_scores(evals)}


class Listing:
    """The runs below a folder, for as many pages as ask. Made for several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each run, in the order of their names; those that this look has no
        time for say so, and are read by the next one."""
        with self._lock:
            known, found = self._watched, list[dict[str, Any]]()
            self._watched = {}
            end = time.monotonic() + LOOK
            for name, run in find_runs(self.folder).items():
                watched = self._watched[name] = known.get(name) or _Watched(name, run)
                if not watched.said and time.monotonic() > end:
                    found.append(watched.unread())
                else:
                    found.append(watched.line())
            return found


def newest_sample(run: Path) -> int | None:
    """Return the iteration of the newest strip of samples; None without any."""
    try:
        names = os.listdir(run / SAMPLES)
    except OSError:
        return None
    stems = [name[:-4] for name in names if name.endswith(".png")]
    known = [int(stem) for stem in stems if len(stem) >= 6 and stem.isdecimal() and stem.isascii()]
    return max(known, default=None)


def _scores(evals: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the held-out score before training and now, with its interval."""
    if not evals:
        return {}
    first, now, total = evals[0], evals[-1], evals[-1].total
    found: dict[str, Any] = {"scored_by": now.name, "evaluated": now.iteration}
    if first.name == now.name and first.iteration == 0:
        found["before"] = finite_or_none(first.total.mean)
    found["score"], found["interval"] = finite_or_none(total.mean), None
    if math.isfinite(total.low) and math.isfinite(total.high):
        found["interval"] = (total.low, total.high)
    return found


def _iterations(run: Path) -> int | None:
    """Return how many iterations a run is to take, where its config says so. Raises RunError."""
    train, found = read_settings(run).get("train"), None
    if isinstance(train, dict):
        found = train.get("iterations")
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    return None
