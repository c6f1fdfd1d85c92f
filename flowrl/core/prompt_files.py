"""Prompts from files and from the hub: each item with its place, for messages.

A file is text, JSON, JSONL, CSV or TSV. From the hub come data sets by id, files of one, and
published lists by a name of their own.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.installation import install

Items = Iterator[tuple[str, Any]]

COLUMNS = ("prompt", "caption", "text")

PUBLISHED = {
    "drawbench": "hub:sayakpaul/drawbench",
    "partiprompts": "hub:nateraw/parti-prompts",
    "pickscore/test": "hub:yuvalkirstain/pickapic_v1_no_images@test_unique",
    "pickscore/train": "hub:CarperAI/pickapic_v1_no_images_training_sfw",
    "hpdv2/test": "hub:zhwang/HPDv2/benchmark/*.json",
    "t2i-compbench/color": "t2i-compbench:hub:NinaKarine/t2i-compbench/color_val",
    "t2i-compbench/shape": "t2i-compbench:hub:NinaKarine/t2i-compbench/shape_val",
    "t2i-compbench/texture": "t2i-compbench:hub:NinaKarine/t2i-compbench/texture_val",
    "t2i-compbench/spatial": "t2i-compbench:hub:NinaKarine/t2i-compbench/spatial_val",
    "t2i-compbench/non_spatial": "t2i-compbench:hub:NinaKarine/t2i-compbench/non_spatial_val",
}
"""Name of a list -> where it is read from. None of them is shipped; their licences are their
owners'."""

FILE = (
    "Prompts from a file need no hub: prompts.train and prompts.test in the config, or --prompts "
    "FILE of the commands that have it"
)
_BOM = "\ufeff"


def read_items(file: Path) -> Items:
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
        # files joined with `cat` carry a mark at every seam
        line = line.strip().lstrip(_BOM).strip()
        if line:
            yield f"{file}, line {number}", line


def _read_txt(text: str, file: str) -> Items:
    yield from _lines(text, file)


def _read_jsonl(text: str, file: str) -> Items:
    for where, line in _lines(text, file):
        item = _json(line, where)
        if not isinstance(item, dict):
            raise DataError(
                f'{where}: expected an object like {{"prompt": "a red circle"}}, got '
                f"{kind_of(item)}"
            )
        yield where, item


def _read_json(text: str, file: str) -> Items:
    if not text.strip():
        return
    items = _json(text, file)
    if not isinstance(items, list):
        raise DataError(
            f"{file}: expected a list of prompts or of objects with a prompt, got {kind_of(items)}"
        )
    for number, item in enumerate(items, 1):
        yield f"{file}, entry {number}", item


def _read_csv(text: str, file: str, delimiter: str = ",") -> Items:
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


def _read_tsv(text: str, file: str) -> Items:
    return _read_csv(text, file, "\t")


_READERS: dict[str, Callable[[str, str], Items]] = {
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


def on_hub(name: str) -> bool:
    """Say whether a list is read from the hub: by name, or as `hub:...`."""
    return name in PUBLISHED or "hub:" in name


def read_hub(name: str) -> Items:
    """Read prompts of the hub -> (place, record).

    `owner/name` is a data set, `owner/name/config` one of its configs, each with `@split`; without
    it the split "train", or the only one there is. `owner/name/folder/*.json` are prompt files of
    its repository, each a task of its own. A local folder of a data set is read as one. A data set
    needs the package `datasets` (the extra `hub`); its column is the first named prompt, prompts,
    caption or text, in any case. Raises ConfigError for a hub that cannot be reached, DataError.
    """
    path, _, _ = name.partition("@")
    repository, pattern = _split(path)
    if not Path(path).is_dir() and pattern.lower().endswith(ENDINGS):
        yield from _files(name, repository, pattern)
        return
    column = ""
    for where, row in hub_rows(name):
        column = column or _hub_column(name, row)
        plain = (str, int, float, bool, type(None))
        record = {key: value for key, value in row.items() if isinstance(value, plain)}
        yield where, {**record, "prompt": row[column]}


def hub_rows(name: str) -> Items:
    """Read the rows of a data set as they are, but for images, which are not decoded. Raises
    ConfigError."""
    path, _, split = name.partition("@")
    repository, config = (path, "") if Path(path).is_dir() else _split(path)
    found = _data_set(name, repository, config, split)
    for number, row in enumerate(found.select_columns(_light(found)), 1):
        yield f"hub:{name}, row {number}", row


def _split(path: str) -> tuple[str, str]:
    """Split `owner/name/rest` into repository and rest."""
    parts = path.split("/")
    return "/".join(parts[:2]), "/".join(parts[2:])


def _hub_column(name: str, row: dict[str, Any]) -> str:
    named = {column.lower().removesuffix("s"): column for column in row}
    column = next((named[known] for known in COLUMNS if known in named), None)
    if column is None:
        raise DataError(f"hub:{name}: expected a column {', '.join(COLUMNS)}, got {', '.join(row)}")
    return column


def _data_set(name: str, path: str, config: str, split: str) -> Any:
    """Open a split of a data set."""
    try:
        # an optional package, so its absence is explained here
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"hub:{name}: {error}; install it with: {install('hub')}. {FILE}"
        ) from error
    try:
        found = datasets.load_dataset(path, config or None, split=split or None)
    except Exception as error:  # offline, misspelt, no such split: the library raises all sorts
        raise _unreachable(name, error) from error
    # no split was named: take "train", or the only one
    if isinstance(found, dict):
        only = "train" if "train" in found else next(iter(found))
        if only != "train" and len(found) > 1:
            raise ConfigError(f"hub:{name}: expected one of the splits {', '.join(found)} after @")
        found = found[only]
    return found


def _files(name: str, repository: str, pattern: str) -> Items:
    """Read prompt files of a repository."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", allow_patterns=[pattern]))
    except Exception as error:  # offline, misspelt, gated
        raise _unreachable(name, error) from error
    files = sorted(folder.glob(pattern))
    if not files:
        raise _unreachable(name, FileNotFoundError(f"no file {pattern} in {repository}"))
    for file in files:
        for where, item in read_items(file):
            place = f"hub:{repository}/{file.relative_to(folder)}{where.removeprefix(str(file))}"
            record = {"prompt": item} if isinstance(item, str) else item
            yield place, {"tag": file.stem, **record} if isinstance(record, dict) else record


def _unreachable(name: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"hub:{name}: the data set cannot be read: {reason}. Is the id right, the hub in reach and "
        f"HF_HUB_OFFLINE unset? {FILE}"
    )


def _light(found: Any) -> list[str]:
    """Return the columns without images, which nobody needs to decode."""
    kinds = found.features
    return [name for name in found.column_names if hasattr(kinds[name], "dtype")]
