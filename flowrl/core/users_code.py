"""What a user's code raises, as one message that names the line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.core.errors import FlowRLError

# all that a user's code may fail with; KeyboardInterrupt is the user
FAILURES = (Exception, SystemExit)


@contextmanager
def as_one_message(what: str, kind: type[FlowRLError]) -> Iterator[None]:
    """Turn what is raised inside into one message of `kind`; our own errors pass as they are."""
    try:
        yield
    except FlowRLError:
        raise
    except FAILURES as error:
        raise kind(f"{what} failed with {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Say what was raised, and in which line of the user's code where that is known."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and not _is_ours(frame.filename)
    ]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _is_ours(file: str) -> bool:
    """Say whether a line is of flowrl itself, or of Python's `with` statement."""
    return Path(file).is_relative_to(Path(__file__).parents[1]) or file.endswith("contextlib.py")
