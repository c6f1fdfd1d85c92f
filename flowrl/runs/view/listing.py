"""The runs below a folder, a line for each, read anew only where a file changed: of a log that grew
only what came to it. No torch, no numpy."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.config.overrides import parse_yaml
from flowrl.core.errors import DataError, RunError
from flowrl.core.files import read_text
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
    evaluation,
    is_locked,
    parse_rows,
    read_bytes,
    read_object,
)

DEEP, MOST = 4, 500  # folders below the given one; runs
RECENT = 20  # iterations whose time says how long those to come take
LOOK = 1.0  # seconds for runs that were never read, in one answer
LAST = 64  # bytes by which a log is known again


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
    ended = any((run / name).is_file() for name in (SUMMARY, RESULT))
    return "done" if ended else "stopped"


class _Log:
    """A log, read on from where the last look ended; what `keep` makes of its last rows."""

    def __init__(
        self,
        path: Path,
        keep: Callable[[dict[str, Any]], Any],
        most: int,
        latest_only: bool = False,
    ) -> None:
        """latest_only: rows above the last ones are not even looked at."""
        self.path, self.keep, self.latest_only = path, keep, latest_only
        self.kept: deque[Any] = deque(maxlen=most)
        self.first: Any = None
        self._forget()

    def _forget(self) -> None:
        self.kept.clear()
        self.first, self._rows, self._read, self._last = None, 0, 0, b""

    def look(self) -> None:
        """Read what came to the log since the last look. Raises RunError for a damaged line."""
        # a log that was cut or written anew is read from its beginning
        data = read_bytes(self.path, max(0, self._read - len(self._last)))
        if not data.startswith(self._last):
            self._forget()
            data = read_bytes(self.path)
        new = data[len(self._last) :]
        if self._rows == 0 and self.latest_only:
            ahead = new.splitlines(keepends=True)[: -(self.kept.maxlen or 1) - 1]
            self._rows, skipped = len(ahead), b"".join(ahead)
            self._read, new = len(skipped), new[len(skipped) :]
        # a torn line is looked at again, once it is whole
        whole = new[: new.rfind(b"\n") + 1]
        try:
            rows = parse_rows(new.splitlines(keepends=True), self.path, self._rows)
            ends = whole.count(b"\n")
            for number, row in enumerate(rows):
                made = self.keep(row)
                if number < ends:
                    self.first = made if self.first is None else self.first
                    self.kept.append(made)
        except DataError as error:
            self._forget()
            raise RunError(f"{self.path}: {error}") from error
        except RunError:
            self._forget()
            raise
        self._rows += ends
        self._read += len(whole)
        self._last = (self._last + whole)[-LAST:]


class _Watched:
    """A run, and what was last said of it."""

    def __init__(self, name: str, run: Path) -> None:
        self.name, self.run = name, run
        self.seen: Stamps = {}
        self.said: dict[str, Any] = {}
        self.metrics = _Log(run / METRICS, _iteration, 1)
        self.timing = _Log(run / TIMING, _seconds, RECENT, latest_only=True)
        self.evals = _Log(run / EVALS, evaluation, 1)
        self.wanted: int | None = None

    def line(self) -> dict[str, Any]:
        """Return the run's line in the list; what cannot be read is said in it."""
        now = stamps(self.run)
        if now != self.seen or not self.said:
            # after a failure everything is looked at again
            old = {} if "error" in self.said else self.seen
            changed = {name for name in {*now, *old} if now.get(name) != old.get(name)}
            try:
                self.said = {**self._begun(now), **self._told(changed)}
            except Exception as error:  # whatever is in its files, the others are shown
                self.said = {**self._begun(now), "error": str(error)}
            self.seen = now
        if "error" in self.said:
            return {**self.said, "state": "damaged"}
        state = state_of(self.run)
        left = self.said["seconds_left"] if state == "training" else None
        return {**self.said, "state": state, "seconds_left": left}

    def unread(self) -> dict[str, Any]:
        """Return the line of a run whose logs were not looked at yet."""
        return {**self._begun({}), "state": state_of(self.run), "reading": True}

    def _begun(self, now: Stamps) -> dict[str, Any]:
        return {"id": self.name, "stamp": stamp(now), "iterations": 0, "score": None}

    def _told(self, changed: set[str]) -> dict[str, Any]:
        """Read what changed -> the parts of the line. Raises FlowRLError for what is damaged."""
        for log in (self.metrics, self.timing, self.evals):
            if log.path.name in changed:
                log.look()
        if SUMMARY in changed and (self.run / SUMMARY).exists():
            read_object(self.run, SUMMARY)
        if CONFIG in changed:
            self.wanted = _iterations(self.run / CONFIG)
        found: dict[str, Any] = {"wanted": self.wanted, "sample": newest_sample(self.run)}
        if self.metrics.kept:
            found["iterations"], found["reward"] = self.metrics.kept[-1]
        # the whole iterations that are left, at the speed of the last ones
        found["seconds_left"] = None
        times = [value for value in self.timing.kept if value is not None]
        if self.wanted and times and found.get("iterations", 0) < self.wanted:
            left = self.wanted - found.get("iterations", 0)
            found["seconds_left"] = _finite(left * sum(times) / len(times))
        return {**found, **_scores(self.evals.first, [*self.evals.kept])}


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
                late = not watched.said and time.monotonic() > end
                found.append(watched.unread() if late else watched.line())
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


def _iteration(row: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return how many iterations are done, and the reward of the last one."""
    reward = row.get("reward")
    return row["iteration"] + 1, None if reward is None else _finite(float(reward))


def _seconds(row: Mapping[str, Any]) -> float | None:
    value = row.get("total")
    return _finite(float(value)) if isinstance(value, int | float) else None


def _scores(first: Evaluation | None, last: list[Evaluation]) -> dict[str, Any]:
    """Return the held-out score before training and now, with its interval."""
    if first is None or not last:
        return {}
    now, total = last[-1], last[-1].total
    found: dict[str, Any] = {"scored_by": now.name, "evaluated": now.iteration}
    if first.name == now.name and first.iteration == 0:
        found["before"] = _finite(first.total.mean)
    found["score"], ends = _finite(total.mean), (_finite(total.low), _finite(total.high))
    found["interval"] = None if None in ends else ends
    return found


def _finite(value: float) -> float | None:
    """Return a number as JSON has it."""
    return value if math.isfinite(value) else None


def _iterations(path: Path) -> int | None:
    """Return how many iterations a run is to take, where its config says so. Raises FlowRLError."""
    try:
        config = parse_yaml(read_text(path), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    train = config.get("train") if isinstance(config, dict) else None
    found = train.get("iterations") if isinstance(train, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None
