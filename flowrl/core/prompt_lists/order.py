"""An order without chance: things sorted by a digest of themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def digest(*parts: object) -> bytes:
    """Return 16 bytes that depend on what the parts look like as texts, and on nothing else."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()


def shuffled(things: Iterable[T], purpose: str) -> list[T]:
    """Sort things by their digest: one order for each purpose, the same everywhere."""
    return sorted(things, key=lambda thing: digest(purpose, thing))


def pick(choices: list[T], *parts: object) -> T:
    """Choose one of a list by the digest of the parts."""
    return choices[int.from_bytes(digest(*parts), "big") % len(choices)]
