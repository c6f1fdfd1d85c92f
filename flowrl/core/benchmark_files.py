"""Prompt files of published benchmarks in their own formats, and prompts from the hub.

A config or `--prompts` names one with its format in front: `dpg:dpg_bench.csv`,
`unigenbench:test_prompts_en.csv`, `geneval2:geneval2_data.jsonl`, `t2i-compbench:examples/dataset`,
`hub:owner/name`. The files may lie on the hub, as in `dpg:hub:owner/name`. None is shipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import DataError
from flowrl.core.files import parse_json
from flowrl.core.prompt_files import (
    csv_rows,
    first_row,
    hub_rows,
    prompt_name,
    read_hub,
    read_items,
    text_of,
)
from flowrl.core.shipped_files import resource

Items = Iterator[tuple[str, Any]]
_HUB = "hub:"

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
DPG = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
POINTS = (("Testpoints", "Testpoint Description"), ("考点", "考点对应描述"))
"""Keys of UniGenBench's test points and of what each asks for, in its English and Chinese files."""


def read_dpg(path: str) -> Items:
    """Read DPG-Bench's CSV (2403.05135): a row per question, the rows of a prompt one after another
    -> records with "questions".

    A question has "id", "question", "parents" (ids that must be true before it counts), "tuple",
    and "first" for the file's first one, which the published loader leaves out. Raises DataError
    naming the line.
    """
    key = DPG[-1]
    record: dict[str, Any] = {}
    began = ""
    for number, (where, row) in enumerate(_rows(path, DPG)):
        # a new id ends the prompt before it: its record is complete
        if row["item_id"] != record.get("id"):
            if record:
                yield began, _checked_dpg(record, began)
            record = {"id": row["item_id"], "prompt": row["text"], "questions": []}
            began = where
        try:
            # ids are numbers; a parent 0 means "depends on nothing" and is dropped below
            parents = [int(part) for part in row["dependency"].split(",") if part.strip()]
            own = int(row["proposition_id"])
        except ValueError:
            raise DataError(
                f"{where}: expected whole numbers as proposition_id and dependency, got "
                f"{row['proposition_id']!r} and {row['dependency']!r}"
            ) from None
        question = {"id": own, "question": row[key], "tuple": row["tuple"]}
        question["parents"] = [parent for parent in parents if parent != 0]
        question["first"] = number == 0
        record["questions"].append(question)
    # the last prompt has no row behind it that would end it
    if record:
        yield began, _checked_dpg(record, began)


def _checked_dpg(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Refuse a question without words, an id that stands twice, and a parent that is not there."""
    ids = [question["id"] for question in record["questions"]]
    for question in record["questions"]:
        gone = [parent for parent in question["parents"] if parent not in ids]
        if gone or not question["question"].strip() or ids.count(question["id"]) > 1:
            raise DataError(
                f"{where}: prompt {record['id']}: expected questions with words, ids of their own "
                f"and parents among {ids}, got {question}"
            )
    return record


def read_unigenbench(path: str) -> Items:
    """Read UniGenBench's CSV (2508.20751): a row per prompt, its test points as JSON -> records
    with "testpoints" and "descriptions".

    English and Chinese files have other names of columns, and of keys in the cells. Raises
    DataError naming the line; row 509 of the published long English file is invalid JSON, which has
    to be repaired.
    """
    for where, row in _rows(path, ()):
        # the file's own column names, whichever language they end in
        prompt, sub = prompt_name(row), _dimensions(row)
        if prompt is None or sub is None:
            raise DataError(
                f"{where}: expected columns prompt_en and sub_dims_en (or _zh), got "
                f"{', '.join(row)}"
            )
        # the test points are JSON inside one cell
        try:
            raw = parse_json(row[sub], "the cell", error=DataError)
            keys = next(keys for keys in POINTS if {*keys} <= {*raw})
        except (DataError, TypeError, StopIteration) as error:
            names = " or ".join(" and ".join(keys) for keys in POINTS)
            raise DataError(
                f"{where}: column {sub}: expected JSON with {names}, got {row[sub][:80]!r} "
                f"{error}".rstrip()
            ) from error
        record = {
            "prompt": row[prompt].strip(),
            "testpoints": raw[keys[0]],
            "descriptions": raw[keys[1]],
            "index": row.get("index", ""),
        }
        yield where, record


def _dimensions(names: Iterable[str]) -> str | None:
    """Return UniGenBench's column of test points."""
    return next((name for name in names if name.startswith("sub")), None)


def format_within(file: Path) -> str:
    """Say by its columns of which benchmark a file is, whose rows are not a prompt each; "" for any
    other."""
    if file.suffix.lower() == ".csv" and {*DPG} <= {*first_row(text_of(file), ",")}:
        return "dpg"
    return ""


def read_geneval2(path: str) -> Items:
    """Read GenEval 2's JSONL (2512.16853): "vqa_list" of [question, answer], "skills",
    "atom_count" -> records whose tag is the number of atoms."""
    if path.startswith(_HUB):
        items = hub_rows(path.removeprefix(_HUB))
    else:
        items = read_items(resource(path))
    for where, item in items:
        if not isinstance(item, dict) or not isinstance(item.get("vqa_list"), list):
            raise DataError(f'{where}: expected an object with a "vqa_list", got {item!r:.100}')
        yield where, {"tag": f"{item.get('atom_count', '?')} atoms", **item}


def _rows(path: str, needed: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield ("file, line 3", row) of a CSV, or of a data set of the hub. Raises DataError."""
    if path.startswith(_HUB):
        # on the hub columns have types: all become texts, as in a CSV
        for where, found in hub_rows(path.removeprefix(_HUB)):
            _check_columns(found, needed, where)
            texts = {}
            for key, value in found.items():
                texts[key] = "" if value is None else str(value)
            yield where, texts
        return
    file = resource(path)
    names: list[str] = []
    for where, row in csv_rows(text_of(file), str(file), ","):
        # the first row names the columns
        if not names:
            names = row
            _check_columns(names, needed, str(file))
            continue
        if len(row) != len(names):
            raise DataError(f"{where}: expected {len(names)} columns, got {len(row)}")
        yield where, dict(zip(names, row, strict=True))


def _check_columns(names: Collection[str], needed: tuple[str, ...], where: str) -> None:
    gone = [name for name in needed if name not in names]
    if gone:
        raise DataError(f"{where}: expected columns {', '.join(needed)}; {gone} are not there")


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
    files = [place]
    if place.is_dir():
        files = [place / f"{category}_val.txt" for category in PARTS]
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


READERS: dict[str, Callable[[str], Items]] = {
    "dpg": read_dpg,
    "unigenbench": read_unigenbench,
    "geneval2": read_geneval2,
    "t2i-compbench": read_compbench,
    "hub": read_hub,
}
"""Format -> what reads it."""


def format_of(path: str) -> tuple[str, str]:
    """Split `dpg:file.csv` into format and path; ("", path) where no format is named."""
    kind, colon, rest = path.partition(":")
    if colon and kind in READERS:
        return kind, rest
    return "", path
