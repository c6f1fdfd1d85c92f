"""The formats of prompt files: a file becomes items, each with its place in it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import DataError

COLUMNS = ("prompt", "caption", "text")
_BOM = "\ufeff"


def read_items(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("file, line 3", item) of each prompt: a text, or an object that may lack anything.

    Raises DataError for an ending that is none of `_READERS`, and where the file cannot be read as
    what its ending says.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(
            f"{file}: expected a file that ends in {', '.join(_READERS)}, got "
            f"{file.suffix or 'no ending'!r}"
        )
    yield from reader(text_of(file), str(file))


def text_of(file: Path) -> str:
    """Return the text of a file, without a byte order mark. Raises DataError naming the line."""
    try:
        # bytes first, so that bad ones can be shown with their line
        data = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read as a prompt file: {error.strerror or error}"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        # Windows programs often save UTF-16; its mark gives it away
        utf16 = " (it looks like UTF-16)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise DataError(
            f"{file}, line {line}: expected UTF-8 text, got the byte "
            f"0x{data[error.start]:02x}{utf16}; save it as UTF-8"
        ) from error
    return text.lstrip(_BOM)


def _lines(text: str, file: str) -> Iterator[tuple[str, str]]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028, which JSON allows inside a
    # text.
    for number, line in enumerate(text.split("\n"), 1):
        line = (
            line.strip().lstrip(_BOM).strip()
        )  # files joined with `cat` carry a mark at every seam
        if line:
            yield f"{file}, line {number}", line


def _read_txt(text: str, file: str) -> Iterator[tuple[str, Any]]:
    yield from _lines(text, file)


def _read_jsonl(text: str, file: str) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(text, file):
        item = _json(line, where)
        if not isinstance(item, dict):
            raise DataError(
                f'{where}: expected an object like {{"prompt": "a red circle"}}, got '
                f"{kind_of(item)}"
            )
        yield where, item


def _read_json(text: str, file: str) -> Iterator[tuple[str, Any]]:
    if not text.strip():
        return
    items = _json(text, file)
    if not isinstance(items, list):
        raise DataError(
            f"{file}: expected a list of prompts or of objects with a prompt, got {kind_of(items)}"
        )
    for number, item in enumerate(items, 1):
        yield f"{file}, entry {number}", item


def _read_csv(text: str, file: str, delimiter: str = ",") -> Iterator[tuple[str, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    column = ""
    start = 1
    try:
        # a cell may hold line breaks: a row is named by its first line
        for row in reader:
            where, start = f"{file}, line {start}", reader.line_num + 1
            if not any(cell.strip() for cell in row):
                continue
            # the first row that is not blank names the columns
            if header is None:
                header = [cell.strip() for cell in row]
                column = _column(header, where)
            elif len(row) != len(header):
                raise DataError(
                    f"{where}: expected {len(header)} columns as in the header, got {len(row)}"
                )
            else:
                # the text under "prompt", whatever its column was called
                record = dict(zip(header, row, strict=True))
                yield where, {**record, "prompt": record[column].strip()}
    except csv.Error as error:
        raise DataError(
            f"{file}, line {start}: expected comma or tab separated values, got a broken row: "
            f"{error}"
        ) from error


def _read_tsv(text: str, file: str) -> Iterator[tuple[str, Any]]:
    return _read_csv(text, file, "\t")


_READERS: dict[str, Callable[[str, str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_txt,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}


ENDINGS = tuple(_READERS)


def _column(header: list[str], where: str) -> str:
    if len(set(header)) != len(header):
        raise DataError(
            f"{where}: expected column names that differ, got {', '.join(map(repr, header))}"
        )
    by_name = {name.lower(): name for name in header}
    for name in COLUMNS:
        if name in by_name:
            return by_name[name]
    raise DataError(
        f"{where}: expected a column named {' or '.join(COLUMNS)}, got "
        f"{', '.join(map(repr, header))}"
    )


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if error.lineno > 1 else where
        raise DataError(
            f"{place}, column {error.colno}: expected JSON, got a fault in it: {error.msg}"
        ) from error
    except RecursionError as error:
        raise DataError(
            f"{where}: expected a flat record, got JSON that is nested too deeply"
        ) from error
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: expected JSON, got what cannot be read: {error}") from error


def kind_of(value: Any) -> str:
    """Say in words what kind of JSON value this is."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
