"""What the pages need scipy for, each in a process of its own that ends: so the server, which may
stand beside a training for days, stays small."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import FlowRLError, RunError
from flowrl.core.files import finite_or_none
from flowrl.runs.folder import EVALS, read_rows
from flowrl.runs.view.listing import stamps

if TYPE_CHECKING:
    from flowrl.evaluation.statistics import Result, Strength

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flowrl.runs.view.apart import answer; answer()"
)
SECONDS = 120.0  # for an answer, on a machine that trains


class Verdicts:
    """What `flowrl.runs.report.page.verdict_of` says of runs, asked anew only when an evaluation
    came. Made for several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, list[str]]] = {}
        self._lock = threading.Lock()

    def of(self, run: Path) -> list[str]:
        """Return the verdict on a run. Raises RunError."""
        if len(read_rows(run, EVALS)) < 2:
            return []
        now = stamps(run).get(EVALS)
        with self._lock:
            if self._known.get(run, (None, []))[0] != now:
                self._known[run] = (now, _asked({"run": str(run.resolve())}))
            return self._known[run][1]


def strengths(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the Bradley-Terry strengths of `names` for a page, the first one's 0. Raises
    RunError."""
    return _asked({"results": list(results), "names": list(names)})


def _asked(question: dict[str, Any]) -> Any:
    """Start a process that answers a question. Raises RunError."""
    command = [sys.executable, "-c", START, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=SECONDS
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"view: cannot work out the statistics: {error}") from error
    except (IndexError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:]
        raise RunError(f"view: cannot work out the statistics: {' '.join(last)}") from error
    if "error" in found:
        raise RunError(found["error"])
    return found["found"]


def answer() -> None:
    """Read a question and print its answer: the main function of the other process."""
    asked, found = json.load(sys.stdin), dict[str, Any]()
    try:
        if "run" in asked:
            found["found"] = _verdict(asked["run"])
        else:
            found["found"] = _strengths(**asked)
    except FlowRLError as error:
        found["error"] = str(error)
    print(json.dumps(found))


def _verdict(run: str) -> list[str]:
    from flowrl.runs.report.page import verdict_of

    return verdict_of(Path(run))


def _strengths(results: Sequence[Result], names: Sequence[str]) -> list[dict[str, Any]]:
    from flowrl.evaluation.statistics import bradley_terry  # by scipy

    every = [(one, two, label) for one, two, label in results]  # JSON has no tuples
    return [_plain(found) for found in bradley_terry(every, names)]


def _plain(found: Strength) -> dict[str, Any]:
    """Return a strength as JSON has it: no NaN."""
    share, low, high = found.share()
    values = {"score": found.score, "low": found.low, "high": found.high}
    values |= {"share": share, "share_low": low, "share_high": high}
    known = {key: finite_or_none(round(value, 4)) for key, value in values.items()}
    return {"name": found.name, "votes": found.votes, **known}
