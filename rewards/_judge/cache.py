"""Answers of a judge on disk: one JSON file per question, written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.core.errors import RunError
from flowrl.core.files import write_text

from .answer import Answer


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
