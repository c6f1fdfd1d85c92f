"""Prompt files of T2I-CompBench (2307.06350) in its own layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import DataError
from flowrl.core.hub_prompts import read_hub
from flowrl.core.prompt_files import read_items
from flowrl.core.shipped_files import resource

Items = Iterator[tuple[str, Any]]

PARTS = {
    "color": ["attribute"],
    "shape": ["attribute"],
    "texture": ["attribute"],
    "spatial": ["spatial"],
    "non_spatial": ["action"],
    "complex": ["attribute", "spatial", "action"],
}
"""Category -> how its images are judged; of `complex` where a prompt is in neither list."""
LISTS = {"spatial": ["attribute", "spatial"], "action": ["attribute", "action"]}
_NAME = re.compile(rf"({'|'.join(PARTS)})(_.+)?")


def read_compbench(path: str) -> Items:
    """Read T2I-CompBench's prompts -> records with the category as "tag", and "parts".

    `path` is the folder `examples/dataset` of the benchmark's repository: `color_val.txt` and the
    five others that are there; or one such file, such as `color_train.txt`; or
    `hub:owner/name/color_val`. Which of the three measures a complex prompt is judged by stands in
    `complex_val_spatial.txt` and `complex_val_action.txt` beside `complex_val.txt`. Raises
    DataError, with file and line for a bad row.
    """
    if path.startswith("hub:"):
        # a data set of the hub is one category; its name says which
        name = path.removeprefix("hub:")
        category = _category(name.rpartition("/")[2].partition("@")[0], path)
        if category == "complex":
            raise DataError(
                f"{path}: expected another category than complex: its lists of spatial and action "
                "prompts are files of the benchmark's repository; give that folder"
            )
        for where, item in read_hub(name):
            yield where, {**item, "tag": category, "parts": PARTS[category]}
        return
    # of a folder all categories that are there, of a file this one
    place = resource(path)
    files = [place / f"{category}_val.txt" for category in PARTS] if place.is_dir() else [place]
    there = [file for file in files if file.is_file()]
    if not there:
        raise DataError(
            f"{place}: expected T2I-CompBench's files, such as color_val.txt and complex_val.txt "
            "(examples/dataset of its repository), got none of them"
        )
    for file in there:
        yield from _read(file)


def _read(file: Path) -> Items:
    """Read one file of prompts."""
    category = _category(file.stem, str(file))
    lists = _lists(file) if category == "complex" else {}
    for where, item in read_items(file):
        record = {"prompt": item} if isinstance(item, str) else item
        if not isinstance(record, dict):
            yield where, record  # the caller says what is wrong with it
            continue
        parts = PARTS[category]
        for kind, prompts in lists.items():
            if _plain(str(record.get("prompt", ""))) in prompts:
                parts = LISTS[kind]
                break
        yield where, {"tag": category, "parts": parts, **record}


def _lists(file: Path) -> dict[str, set[str]]:
    """Return the prompts of the lists beside a file of complex prompts. Raises DataError."""
    found: dict[str, set[str]] = {}
    for kind in LISTS:
        other = file.with_name(f"{file.stem}_{kind}.txt")
        if not other.is_file():
            raise DataError(
                f"{file}: expected {other.name} beside it, which says how its prompts are judged; "
                'or give a JSONL file with "parts" in each row'
            )
        found[kind] = {_plain(str(item)) for _, item in read_items(other)}
    return found


def _plain(prompt: str) -> str:
    """Return a prompt as the benchmark's code compares them: its first sentence, in lower case."""
    return prompt.partition(".")[0].lower()


def _category(name: str, where: str) -> str:
    found = _NAME.fullmatch(name)
    if found is None:
        raise DataError(
            f"{where}: expected a name that begins with one of {', '.join(PARTS)}, got {name!r}; "
            "3d_spatial and numeracy of T2I-CompBench++ are not judged here"
        )
    return found[1]
