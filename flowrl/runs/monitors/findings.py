"""What monitors found, as the run folder keeps it: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from flowrl.core.files import write_text
from flowrl.runs.folder import FINDINGS, Rows, read_rows


class Alarm(NamedTuple):
    """What is wrong, with its numbers, and what to change: a sentence each."""

    what: str
    advice: str


@dataclass(frozen=True)
class MonitorFinding:
    """Something that a monitor found."""

    iteration: int  # finished iterations
    monitor: str
    what: str  # one sentence with its numbers
    advice: str  # what to change
    action: str  # what was done about it

    def text(self) -> str:
        """Return the finding as the console shows it."""
        return f"monitor {self.monitor}: {self.what}. {self.advice}"


def append_findings(run: Path, findings: Sequence[MonitorFinding]) -> None:
    """Write findings below those that are there. Raises RunError."""
    if findings:
        rows = [*read_rows(run, FINDINGS), *(asdict(one) for one in findings)]
        _write(run, rows)


def keep_first(run: Path, count: int) -> None:
    """Keep the first `count` findings: the others are of iterations that are done anew. The file is
    there from then on, also without any."""
    _write(run, read_rows(run, FINDINGS)[:count])


def _write(run: Path, rows: Rows) -> None:
    write_text(run / FINDINGS, "".join(json.dumps(row) + "\n" for row in rows))
