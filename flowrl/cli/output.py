"""Print for a person, as wide as the terminal, or as JSON for a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.core.tables import fit, terminal_width

Text = Callable[[int | None], str]  # columns of the terminal, None where there is none -> a text


def show(text: str | Text) -> None:
    """Print a text that fits the terminal."""
    width = terminal_width()
    written = text if isinstance(text, str) else text(width)
    print(fit(written, width))


def show_or_write(text: str | Text, value: Any, file: Path | None, *, silent: bool = False) -> None:
    """Print a text unless `silent`, and write `value` as JSON where a file is named; ``-`` prints
    that alone."""
    from flowrl.core.files import is_stdout, write_json

    if file is not None and is_stdout(file):
        print(json.dumps(value, indent=2))
        return
    if not silent:
        show(text)
    if file is not None:
        write_json(file, value)
        if not silent:
            print(f"written: {file}")


def count_up(done: int, total: int) -> None:
    """Say in a terminal how far an evaluation is."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done} of {total} prompts", end=end, file=sys.stderr, flush=True)
