"""A row of performance_queue.py in a process of its own: begun early, measured when it is its
turn."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flowrl.core.files import read_text

HERE = Path(__file__).resolve().parent
LINES = 30
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def reason(stderr: str) -> str:
    """Return why a process ended, of what it said: the last line that begins with the name of an
    error, or else its last line; "" for nothing.

    A CUDA error has lines of advice after the one that names it.
    """
    lines = stderr.strip().splitlines()
    named = [line for line in lines if ERROR.match(line)]
    return "".join((named or lines)[-1:])


class Process:
    """A script that has begun. One that waits imports what it needs meanwhile, which takes about
    as long as a row itself."""

    def __init__(self, script: str, words: list[str], out_option: str, *, waits: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        self.out, self.said = place / "result.json", place / "said.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), *words, *["--wait"] * waits]
                + [out_option, str(self.out)],
                stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def finish(self, seconds: float) -> tuple[float, str]:
        """Let it measure for at most so long -> the seconds that it took, and why it failed or
        "". What it wrote is in `out`."""
        began, failed = time.monotonic(), ""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            failed = f"ended after {seconds:.0f} s"
        else:
            if code or not self.out.is_file():
                failed = reason(read_text(self.said)) or f"exit code {code}"
        return round(time.monotonic() - began, 1), failed

    def told(self) -> list[str]:
        """Return the last lines of what it said, to look for the cause of a failure in."""
        return read_text(self.said).splitlines()[-LINES:]

    def end(self) -> None:
        """Stop it, if it is still there."""
        self.process.kill()
        self.process.wait()
