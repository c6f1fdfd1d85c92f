"""The failures a user can mend, and the words of their messages.

The command line prints them as one message without a traceback. `as_one_message` makes such a
message of what a user's own code raises; `near` and `unknown` name the nearest of the names that
are there.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class FlowRLError(Exception):
    """Say what was expected, what came, where, and how to mend it."""


class ConfigError(FlowRLError):
    """A config file, an override or a value in them is wrong."""


class DataError(FlowRLError):
    """A prompt file, an image or a record in them is wrong."""


class ModelError(FlowRLError):
    """A model folder, its parts or an adapter on top of it is wrong."""


class CheckpointError(FlowRLError):
    """A checkpoint is torn, missing or belongs to another run."""


class RunError(FlowRLError):
    """A run cannot go on: a NaN, an unwritable folder, a full disk."""


class ProcessLost(RunError):
    """Another of several processes is gone; it, or the system, has said why."""


class RewardError(RunError):
    """A reward gave no usable score. The policy is as before, so the run can be saved and go on
    later."""


_BEHIND = 0.2  # of the nearest name: what is less near is no proposal

# all that a user's code may fail with, in a thread, which hears no Ctrl-C
FAILURES = (BaseException,)


@contextmanager
def as_one_message(what: str, kind: type[FlowRLError]) -> Iterator[None]:
    """Turn what is raised inside into one message of `kind`; our own errors pass as they are, and
    so does KeyboardInterrupt, which is the user."""
    try:
        yield
    except (FlowRLError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's code may fail with anything
        raise kind(f"{what} failed with {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Say what was raised, and in which line of the user's code where that is known."""
    # the innermost line that is the user's
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "site-packages" not in frame.filename and not _is_ours(frame.filename):
            place = f" ({Path(frame.filename).name}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"


# what moves a terminal's cursor, changes its colours or title, or turns the direction of writing
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return a text that a terminal shows and does not obey, whoever wrote it: control characters
    become escapes, such as ``\\x1b``; line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _is_ours(file: str) -> bool:
    """Say whether a line is of flowrl itself, or of Python's `with` statement."""
    return Path(file).is_relative_to(Path(__file__).parents[1]) or file.endswith("contextlib.py")


def near(name: object, known: Iterable[str], *, most: int = 3, cutoff: float = 0.5) -> str:
    """Return "; did you mean 'x', 'y' or 'z'?" with the nearest of the known names, or nothing.

    Nearness is 1 minus the edit distance with transpositions (Damerau 1964) over the longer length;
    names of less than `cutoff` are none, and neither are those that are far behind the nearest. A
    word of a name, or its last part, is near the whole one.
    """
    from rapidfuzz.distance import DamerauLevenshtein

    text, ranked = str(name), list[tuple[float, str]]()
    for each in dict.fromkeys(known):
        # the whole name counts a little more than its last part, and that more than a word of it
        words = dict.fromkeys(re.split(r"[/._-]", each), 0.02)
        words |= {re.split(r"[/.]", each)[-1]: 0.01, each: 0.0}
        best = 0.0
        for word, less in words.items():
            best = max(best, DamerauLevenshtein.normalized_similarity(text, word) - less)
        ranked.append((best, each))
    if not ranked:
        return ""
    ranked.sort(key=lambda found: (-found[0], found[1]))
    least = max(cutoff, ranked[0][0] - _BEHIND)
    found = [repr(each) for value, each in ranked[:most] if value >= least]
    if not found:
        return ""
    *others, last = found
    if not others:
        return f"; did you mean {last}?"
    return f"; did you mean {', '.join(others)} or {last}?"


def unknown(name: object, known: Iterable[str], kind: str) -> str:
    """Return "has no KIND 'name'; did you mean 'x'? (there is: all of them)"."""
    names = sorted(known)
    return f"has no {kind} {name!r}{near(name, names)} (there is: {', '.join(names) or 'none'})"


def install(extra: str) -> str:
    """Return the command that installs an extra; nothing is released, so it is for a checkout."""
    return f'pip install -e ".[{extra}]" in a checkout of flowrl'
