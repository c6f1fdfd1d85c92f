"""Hints for a name that is not there: the nearest one that is, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: object, known: Iterable[str], *, most: int = 1, cutoff: float = 0.5) -> str:
    """Return "; did you mean 'x'?" with the nearest of the known names, up to `most` of them, or
    nothing."""
    found = difflib.get_close_matches(str(name), list(known), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def unknown(name: object, known: Iterable[str], kind: str) -> str:
    """Return "has no KIND 'name'; did you mean 'x'? (there is: all of them)"."""
    names = sorted(known)
    return f"has no {kind} {name!r}{near(name, names)} (there is: {', '.join(names) or 'none'})"
