"""What becomes of a judge's answers: the readable ones are kept on disk, one JSON file per
question, written whole or not at all, and the failures are told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import RunError
from flowrl.core.files import write_text

from .answer import Answer
from .client import JudgeQuestion, Server, ask_all

Read = Callable[[str, Answer], Any]
"""``read(key, answer)`` -> its value, or a text that says what is wrong with the answer."""


class Found(NamedTuple):
    """What became of some questions."""

    values: dict[str, Any]  # by key, of those whose answer could be read
    asked: int  # of the server; the others were in the cache
    failed: int


def find_answers(
    server: Server,
    cache: Path | None,
    keys: Collection[str],
    read: Read,
    question: Callable[[str], JudgeQuestion],
) -> Found:
    """Look for the answer to each key's question, in the cache first, then ask the server the rest;
    what can be read is kept in the cache. Questions without an answer are warned of; too many raise
    RunError."""
    found: dict[str, Any] = {}

    def accept(key: str, answer: Answer) -> str:
        """Take an answer -> "", or what is wrong with it."""
        value = read(key, answer)
        if isinstance(value, str):
            return value
        found[key] = value
        if cache is not None:
            keep(cache, key, answer, server.who)
        return ""

    # what is kept and can be read
    for key in keys:
        answer = recall(cache, key) if cache is not None else None
        value = "" if answer is None else read(key, answer)
        if not isinstance(value, str):
            found[key] = value
    # the server with the rest
    left = {key: question(key) for key in keys if key not in found}
    failed = ask_all(server, left, accept, len(keys)) if left else {}
    if failed:
        first = next(iter(failed.values()))
        said = f"{server.who}: {len(failed)} of {len(keys)} questions failed: {first}"
        warnings.warn(said, stacklevel=3)
    return Found(found, len(left), len(failed))


def recall(folder: Path, key: str) -> Answer | None:
    """Return the answer kept under a key; None if there is none, or only a torn one."""
    try:
        kept = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        return Answer(
            str(kept["text"]),
            [(str(token), float(lp)) for token, lp in kept["top"]],
            bool(kept["cut"]),
        )
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
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
