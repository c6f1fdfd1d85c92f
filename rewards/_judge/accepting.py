"""What becomes of a judge's answers: the readable ones are kept, the failures are told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .answer import Answer
from .cache import keep

Accept = Callable[[str, Answer], str]
"""``accept(key, answer)`` -> "", or what is wrong with the answer."""


def accepting(
    found: dict[str, Any], read: Callable[[str, Answer], Any], cache: Path | None, who: str
) -> Accept:
    """Return what takes an answer to the question of a key: once ``read(key, answer)`` is a value,
    and no text that says what is wrong, the value goes into `found` and the answer into the cache
    of `who`."""

    def accept(key: str, answer: Answer) -> str:
        value = read(key, answer)
        if isinstance(value, str):
            return value
        found[key] = value
        if cache is not None:
            keep(cache, key, answer, who)
        return ""

    return accept


def warn_of_failures(who: str, failed: Mapping[str, str], total: int) -> None:
    """Warn of questions without an answer, which are endured as missing scores; too many have
    raised RunError before this. `failed` is {key: what went wrong}, of `total` questions."""
    if failed:
        first = next(iter(failed.values()))
        warnings.warn(f"{who}: {len(failed)} of {total} questions failed: {first}", stacklevel=3)
