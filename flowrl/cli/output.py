"""Print for a person, as wide as the terminal, or as JSON for a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.core.tables import fit, terminal_width

Text = Callable[[int | None], str]  # columns of the terminal, None where there is none -> a text


def print_text(text: str | Text) -> None:
    """Print a text that fits the terminal."""
    width = terminal_width()
    written = text if isinstance(text, str) else text(width)
    print(fit(written, width))


def show_or_write(text: str | Text, value: Any, file: Path | None, *, silent: bool = False) -> None:
    """Print a text unless `silent`, and write `value` as JSON where a file is named; ``-`` prints
    that alone."""
    from flowrl.core.files import is_stdout, json_text, write_json

    if file is not None and is_stdout(file):
        print(json_text(value))
        return
    if not silent:
        print_text(text)
    if file is not None:
        write_json(file, value)
        if not silent:
            print(f"written: {file}")


def refuse_both(out: Path | None, json: Path | None) -> None:
    """Raise ConfigError if a file and JSON were both to go to standard output."""
    from flowrl.core.errors import ConfigError
    from flowrl.core.files import is_stdout

    if out is not None and json is not None and is_stdout(out) and is_stdout(json):
        raise ConfigError("--out and --json cannot both go to standard output; name a file for one")


def in_terminal() -> bool:
    """Say whether somebody sees how far a command is: stderr is a terminal."""
    return sys.stderr.isatty()


EVERY = 30.0  # seconds between two lines of a log file that count
_told: dict[str, float] = {}  # what is counted -> when it was last said


def count_up(done: int, total: int, of: str = "prompts") -> None:
    """Say how far an evaluation is, or what else is counted: in a terminal each time, in a log file
    every `EVERY` seconds."""
    if in_terminal():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} {of}", end=end, file=sys.stderr, flush=True)
        return
    now = time.monotonic()
    if now - _told.setdefault(of, now) >= EVERY:
        print(f"{done} of {total} {of}", file=sys.stderr, flush=True)
        _told[of] = now
    if done >= total:
        del _told[of]


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say in a terminal what is being done, for as long as it is."""
    if not in_terminal():
        yield
        return
    from rich.console import Console

    with Console(stderr=True, force_terminal=True).status(what):
        yield
