"""Hints for a name that is not there: the nearest one that is, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known name that is nearest, or nothing."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown(name: object, known: Iterable[str], kind: str) -> str:
    """Return "has no KIND 'name'; did you mean 'x'? (there is: all of them)"."""
    names = sorted(known)
    return f"has no {kind} {name!r}{near(name, names)} (there is: {', '.join(names) or 'none'})"
