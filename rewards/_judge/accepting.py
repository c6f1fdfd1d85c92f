"""What becomes of a judge's answers: the readable ones are kept on disk, one JSON file per
question, written whole or not at all, and the failures are told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.core.errors import RunError
from flowrl.core.files import write_text

from .answer import Answer

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


def recall(folder: Path, key: str) -> Answer | None:
    """Return the answer kept under a key; None if there is none, or only a torn one."""
    try:
        kept = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        return Answer(
            str(kept["text"]),
            [(str(token), float(lp)) for token, lp in kept["top"]],
            bool(kept["cut"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, key: str, answer: Answer, who: str) -> None:
    """Write an answer under a key. Raises RunError in the name of `who`, a reward, where the folder
    cannot be written."""
    # in ASCII: an answer may hold half of a surrogate pair, which is no UTF-8
    text = json.dumps(answer._asdict())
    try:
        write_text(_file(folder, key), text)
    except RunError as error:
        raise RunError(f"{who}: cache: {error}") from error


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"
