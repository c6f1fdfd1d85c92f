"""Lists of prompts that a call was given, and the tenth of one that is held out."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.config.values import show
from flowrl.core.errors import ConfigError
from flowrl.core.prompts import PromptSet, given_prompts, load_prompts
from flowrl.core.shipped_files import find_resource

SHARE = 10  # of so many different prompts one is held out
FEW = 6  # of so many at least two are


def prompts_of(given: Any, what: str) -> str:
    """Return the name under which a list of prompts is found: a path or a name as it is. Raises
    ConfigError for what is no list, DataError for what is no prompt."""
    if isinstance(given, str | os.PathLike):
        name = os.fspath(given)
        if not name.strip():
            raise ConfigError(f"{what}: expected a path or a name, got an empty text")
        if re.search(r"\s", name) and find_resource(name) is None:  # no list has such a name
            raise ConfigError(
                f"{what}: there is no file {name!r}; a text to draw is given in a list, "
                f"{what}=[{name!r}]"
            )
        return name
    return _listed(given, what).path


def both_lists(given: Any) -> tuple[tuple[str, str], str]:
    """Hold out a tenth of a list -> (the names of the list to train on and of that to judge by,
    what is to be said of it).

    Which prompts are held out follows from their texts alone, so that a call that goes on holds out
    the same; equal texts stay together.
    """
    is_name = isinstance(given, str | os.PathLike)
    whole = load_prompts(prompts_of(given, "prompts")) if is_name else _listed(given, "prompts")
    texts = dict.fromkeys(_plain(text) for text in whole.texts)
    if len(texts) < 2:
        raise ConfigError(
            "prompts: expected at least two different prompts, one to train on and one to judge "
            "by, got one; or give test_prompts"
        )
    # one prompt alone would not say what is chance
    count = max(2 if len(texts) >= FEW else 1, len(texts) // SHARE)
    held = set(sorted(texts, key=_digest)[:count])
    parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    folder = Path(whole.path).parent
    for record in whole.records:
        own = _with_absolute_files(record, folder) if is_name else record
        parts[_plain(record["prompt"]) in held].append(own)
    train, test = (given_prompts(parts[part], name) for part, name in _PARTS)
    said = (
        f"no test_prompts were given: {len(test)} of {len(whole)} prompts are held out to judge by "
        f"(first: {test.texts[0]!r})"
    )
    return (train.path, test.path), said


_PARTS = ((False, "train"), (True, "test"))


def _listed(given: Any, what: str) -> PromptSet:
    """Read a list of texts or records in memory, with files that they name seen from the working
    folder."""
    iterable = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping)
    if not iterable:
        raise ConfigError(
            f"{what}: expected a path or the name of a list, a list of texts or of records with a "
            f"'prompt', or a datasets.Dataset, got {show(given)}"
        )
    records = []
    for item in given:
        if isinstance(item, Mapping):
            item = _with_absolute_files({**item}, Path())
        records.append(item)
    return given_prompts(records, what)


def _with_absolute_files(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a record whose files are named by absolute paths: it is kept in another folder."""
    return {key: _absolute(value, folder) for key, value in record.items()}


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(one, folder) for one in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    named = isinstance(value, str) and 0 < len(value) < 1000 and Path(value).suffix
    if named and (folder / value).is_file():
        return str((folder / value).resolve())
    return value


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
