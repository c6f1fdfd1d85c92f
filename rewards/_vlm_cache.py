"""Answers of a judge on disk: one JSON file per question, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from flowrl.errors import RunError
from rewards._vlm_answers import Answer


def recall(folder: Path, key: str) -> Answer | None:
    """Return the answer kept under a key; None if there is none, or only a torn one."""
    try:
        kept = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        return Answer(str(kept["text"]), [(str(token), float(lp)) for token, lp in kept["top"]], bool(kept["cut"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(folder: Path, key: str, answer: Answer) -> None:
    """Write an answer under a key. Raises RunError where the folder cannot be written."""
    file = _file(folder, key)
    draft = file.with_name(f"{key}.{secrets.token_hex(4)}.tmp")  # of this writer alone: runs may share a folder
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(answer._asdict(), ensure_ascii=False), encoding="utf-8")
        os.replace(draft, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise RunError(f"rewards.vlm: cache: cannot write {file}: {error.strerror or error}") from error


def _file(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"
