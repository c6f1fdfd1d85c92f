"""Prompts from files and from the hub: each item with its place, for messages.

A file is text, JSON, JSONL, or a table (CSV, TSV), as people have them: `COLUMNS` names the columns
and keys that hold prompts. From the hub come data sets by id, files of one, and published lists by
a name of their own.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, DataError, install
from flowrl.core.files import parse_json

Items = Iterator[tuple[str, Any]]

COLUMNS = (
    *("prompt", "caption", "text", "prompt_en", "prompt_zh", "prompt_cn", "text_prompt"),
    *("prompt_text", "user_prompt", "positive_prompt", "image_caption", "instruction"),
    *("提示词", "tags"),
)
"""Names of what holds a prompt, the first that is there wins; in any case, with an s at the end,
and with spaces or hyphens for the underscores."""
WRAPPERS = (
    "data", "items", "rows", "records", "examples", "entries", "annotations",
    "train", "test", "val", "validation",
)  # fmt: skip
"""Keys of a JSON object below which its records stand."""
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".avif", ".jxl")
MEND = (
    "Name the column or key that holds the prompts so, or write them one per line into a .txt file"
)

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
        got = f"0x{data[error.start]:02x}"
        # Windows programs often save UTF-16; its mark gives it away
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            got += " (it looks like UTF-16)"
        raise DataError(
            f"{file}, line {line}: expected UTF-8 text, got the byte {got}; save it as UTF-8"
        ) from error
    return text.lstrip(_BOM)


def prompt_name(names: Iterable[Any]) -> str | None:
    """Return which of the names of columns or keys holds the prompt; None where none does, or where
    several differ by their spelling alone."""
    spelt: dict[str, list[str]] = {}
    for name in names:
        if isinstance(name, str):
            plain = re.sub(r"[\s-]+", "_", name.strip().lstrip(_BOM).strip().lower())
            spelt.setdefault(plain, []).append(name)
    for known in COLUMNS:
        found = spelt.get(known, []) + spelt.get(f"{known}s", [])
        if known in found:  # the name itself before other spellings of it
            return known
        if len(found) == 1:
            return found[0]
        if found:
            return None
    return None


def with_prompt(item: Any) -> Any:
    """Return an object with its text under "prompt", whatever it was called; anything else as it
    is."""
    if not isinstance(item, dict) or "prompt" in item:
        return item
    there = {name: value for name, value in item.items() if value is not None}
    name = prompt_name(there) or prompt_name(item)
    if name is None:
        return item
    return {**item, "prompt": item[name]}


def labelled(item: Any, label: dict[str, str]) -> Any:
    """Return a text or an object as a record that begins with a label, which the object's own key
    of that name outdoes; anything else as it is."""
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        return item
    return {**label, **item}


def no_prompt(where: str, what: str, got: Iterable[Any]) -> DataError:
    """Return the error for columns or keys of which none holds a prompt."""
    names = [repr(name) if len(str(name)) < 60 else f"{str(name)[:57]!r}..." for name in got]
    return DataError(
        f"{where}: expected {what} (known names: {', '.join(COLUMNS)}), got "
        f"{', '.join(names[:20]) or 'an empty object'}. {MEND}"
    )


def _cut(text: str) -> list[str]:
    """Cut a text into lines. Only "\\n" ends one, or "\\r" in an old file that has no other:
    str.splitlines would also cut at U+2028, which JSON allows inside a text."""
    if "\n" in text:
        return text.split("\n")
    return text.split("\r")


def _stripped(cells: Iterable[str]) -> list[str]:
    return [cell.strip() for cell in cells]


def _in_each(one: str, lines: list[str]) -> bool:
    """Say whether several lines all have a separator, and equally often."""
    counts = {line.count(one) for line in lines}
    return len(lines) > 1 and len(counts) == 1 and counts != {0}


def _lines(text: str, file: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_cut(text), 1):
        # files joined with `cat` carry a mark at every seam
        line = line.strip().lstrip(_BOM).strip()
        if line:
            yield f"{file}, line {number}", line


_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


def _read_txt(text: str, file: str) -> Items:
    lines = list(_lines(text, file))
    if not lines:
        return
    # records or a table under the name of a text
    first = lines[0][1]
    if first.startswith("{") and _is_object(first):
        yield from _read_jsonl(text, file)
        return
    for one in DELIMITERS:
        names = _stripped(first.split(one))
        if len(names) > 1 and prompt_name(names) and all(map(_WORD.fullmatch, names)):
            yield from _table(text, file, one)
            return
    _check_layout(lines, _WORD)
    if _in_each("\t", [line for _, line in lines]):
        raise _unread(lines[0][0], "columns with tabs between them and no header", _NAMED)
    # the name of a column above sentences, and no prompt
    if prompt_name([first]) is not None and any(" " in line for _, line in lines[1:]):
        del lines[0]
    # a list whose every line stands in quotes was quoted by a program
    quoted = len(lines) > 1 and all(_QUOTED.fullmatch(line) for _, line in lines)
    for where, line in lines:
        if quoted:
            line = _unquoted(line)
        yield where, line


def _is_object(line: str) -> bool:
    try:
        return isinstance(_json(line, ""), dict)
    except DataError:
        return False


def _unquoted(cell: str) -> str:
    """Take the quotes of a whole cell away."""
    found = _QUOTED.fullmatch(cell.strip())
    return found[1].replace('""', '"') if found else cell


# --------------------------------------------------------------------------------------------- JSON


def _read_jsonl(text: str, file: str) -> Items:
    lines = list(_lines(text, file))
    if not lines:
        return
    # one value over several lines, or a list in one, is JSON under another name
    first = lines[0][1]
    if first in ("[", "{", "[{") or (len(lines) == 1 and first.startswith("[")):
        yield from _entries(_json(text, file), file)
        return
    # objects, or texts alone
    kind = str if first.startswith('"') else dict
    for where, line in lines:
        item = _json(line, where)
        if not isinstance(item, kind):
            raise DataError(
                f'{where}: expected an object like {{"prompt": "a red circle"}}, got '
                f"{kind_of(item)}"
            )
        yield where, with_prompt(item)


def _read_json(text: str, file: str) -> Items:
    if not text.strip():
        return
    try:
        items = _json(text, file)
    except DataError:
        # an object a line is JSONL under another name
        lines = list(_lines(text, file))
        if len(lines) < 2 or not all(line[0] == "{" and line[-1] == "}" for _, line in lines):
            raise
        yield from _read_jsonl(text, file)
        return
    yield from _entries(items, file)


def _entries(items: Any, file: str) -> Items:
    """Yield the records of a JSON file, in whichever of the usual shapes they stand."""
    if isinstance(items, dict):
        yield from _of_object(items, file)
        return
    if not isinstance(items, list):
        raise _no_list(file, items)
    for number, item in enumerate(items, 1):
        yield f"{file}, entry {number}", with_prompt(item)


def _of_object(items: dict[str, Any], file: str) -> Items:
    """Yield the records of an object: {prompts: list}, columns, {data: list}, {task: list},
    {id: text} or {id: record}."""
    name, values = prompt_name(items), list(items.values())
    if name is not None:
        column = items[name]
        if isinstance(column, list) and not all(isinstance(one, str) for one in column):
            yield from _entries(column, file)
        elif isinstance(column, list | dict):
            yield from _columns(items, column, file)
        else:  # a record by itself
            raise _no_list(file, items)
        return
    # the records below one key, beside facts about the file
    below = [key for key in items if key in WRAPPERS and isinstance(items[key], list)]
    if len(below) == 1:
        yield from _entries(items[below[0]], f"{file}, {below[0]}")
        return
    if values and all(isinstance(value, list) for value in values):
        # a list for each task
        for task, rows in items.items():
            for where, item in _entries(rows, f"{file}, {task[:40]!r}"):
                yield where, labelled(item, {"tag": task})
        return
    kinds = set(map(type, values))
    if kinds not in ({str}, {dict}):
        raise _no_list(file, items)
    for key, value in items.items():
        # what the records are filed under: a number, or as in kohya's metadata an image
        label = {"id": key}
        if key.lower().endswith(IMAGE_ENDINGS):
            label = {"file": key}
        yield f"{file}, {key[:40]!r}", labelled(with_prompt(value), label)


def _columns(items: dict[str, Any], column: Any, file: str) -> Items:
    """Yield the rows of {column: list} or {column: {row: value}}, as pandas writes tables."""
    keys = list(column) if isinstance(column, dict) else range(len(column))
    fitting = {}
    for name, values in items.items():
        same = type(values) is type(column) and len(values) == len(column)
        if same and (isinstance(values, list) or values.keys() == column.keys()):
            fitting[name] = values
    for number, key in enumerate(keys, 1):
        record = {name: values[key] for name, values in fitting.items()}
        yield f"{file}, entry {number}", with_prompt(record)


def _no_list(file: str, got: Any) -> DataError:
    return DataError(
        f"{file}: expected a list of prompts or of objects with a prompt, or an object that holds "
        f"one, got {kind_of(got)}. {MEND}"
    )


# ------------------------------------------------------------------------------------------- tables

DELIMITERS = ",;|\t"
_PROSE = re.compile(r",(?=\s|$)|(?<=\d),(?=\d{3})")  # commas as a sentence has them
_WORD = re.compile(r"[A-Za-z_]\w*")
Row = tuple[str, list[str]]  # "file, line 3", and the cells


# separators that are not read, a run of symbols that no sentence has between two words; some
# stand in no prompt at all
_SYMBOLS = re.compile(r"""(?:[\x1c-\x1f]|[^\w\s"'./()&!?+-])+""")
_RARE = "~^§¦¬\x01\x1f"
_NAME = re.compile(r"[^\W\d][\w -]*")
_RULED = set(" |+:=-")  # what a line of a table is drawn with
LONGEST_HEADER = 2000  # letters of a line that may name columns
_NAMED = "Name the columns in a first line and call the file .tsv"


def _check_layout(lines: list[tuple[str, str]], word: re.Pattern[str]) -> None:
    """Raise DataError for a table of a kind that is not read, whose lines would be taken for
    prompts. It is known by its first line: names of columns, each a `word`."""
    rest = [line for _, line in lines[1:]]
    if not rest or len(lines[0][1]) > LONGEST_HEADER:
        return
    where, first = lines[0]

    def names_columns(cells: list[str]) -> bool:
        named = _stripped(cells)
        fit = len(named) > 1 and all(map(word.fullmatch, named))
        return fit and prompt_name(named) is not None

    # another separator; a colon before a space belongs to a sentence
    for one in dict.fromkeys(_SYMBOLS.findall(first)):
        read = set(one) <= set(DELIMITERS) or (one == ":" and ": " in first)
        if not read and names_columns(first.split(one)) and all(one in line for line in rest):
            raise _unread(where, f"columns with {one!r} between them", _other_separator(one))
    # columns that spaces align, or lines
    if names_columns(re.split(r" {2,}", first)) and any("  " in line for line in rest):
        raise _unread(where, "columns of fixed width", _SAVE)
    for rule, head in ((first, rest[0]), (rest[0], first)):
        ruled = set(rule) <= _RULED and ("--" in rule or "==" in rule)
        if ruled and prompt_name(_stripped(head.split("|"))) is not None:
            raise _unread(where, "a table that was drawn for people", _SAVE)


_SAVE = (
    "Save it again as CSV (in Python: pandas.read_fwf or read_csv, then to_csv), or write the "
    "prompts one per line into a .txt file"
)


def _other_separator(one: str) -> str:
    """Say how to mend a file with a separator that is not read."""
    above = f"Put the line sep={one} above all others of a .csv file, or save" * (len(one) == 1)
    return (
        f"{above or 'Save'} the table again with one of these (in Python: pandas.read_csv(FILE, "
        f"sep={one!r}).to_csv(FILE, index=False)), or write the prompts one per line into a .txt "
        "file"
    )


def _unread(where: str, what: str, mend: str) -> DataError:
    return DataError(
        f"{where}: expected prompts, one per line, or columns with a comma, a semicolon, a | or a "
        f"tab between them, got {what}. {mend}"
    )


def _read_csv(text: str, file: str, delimiters: str = DELIMITERS) -> Items:
    # Excel may say first what separates the cells; a blank line keeps the numbers of the others
    told = re.match(r"sep=(.)(?=\r?\n)", text)
    if told:
        text, delimiters = text[told.end() :], told[1]
    else:
        _check_layout(list(_lines(text, file)), _NAME)
    # the header says it, too: the first row, split so that it names a column of prompts
    header, delimiter = list[str](), delimiters[0]
    for one in delimiters:
        cells = first_row(text, one)
        if prompt_name(cells) is not None and len(cells) > len(header):
            header, delimiter = cells, one
    # prompts alone, one column of prompts below its name, or a table
    if not header:
        yield from _without_header(text, file, delimiters)
        return
    alone = None
    if len(header) == 1:
        alone = _prompts_alone(text, file, delimiters)
    if alone is not None:
        yield from alone[1:]
    else:
        yield from _table(text, file, delimiter)


def _read_tsv(text: str, file: str) -> Items:
    return _read_csv(text, file, "\t,;|")


def first_row(text: str, delimiter: str) -> list[str]:
    """Return the cells of the first row that is not blank, as far as it can be read."""
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            cells = _stripped(row)
            if any(cells):
                return cells
    except csv.Error:
        pass
    return []


def _table(text: str, file: str, delimiter: str) -> Items:
    """Yield the rows below a header, with the text under "prompt", whatever its column was
    called."""
    # tabs in every line below a header without one are what separates those
    head, *rest = [line for _, line in _lines(text, file)]
    if delimiter != "\t" and rest and "\t" not in head and all("\t" in line for line in rest):
        mixed = f"tabs below a header whose names have {delimiter!r} between them"
        raise _unread(f"{file}, line 1", mixed, "Let one of them separate all lines")
    rows = _tab_rows(text, file) if delimiter == "\t" else None
    header, column = list[str](), ""
    for where, row in rows or csv_rows(text, file, delimiter):
        if not header:
            header = _header(row, where)
            column = prompt_name(header) or ""
            continue
        # empty cells behind the last column are no more than a habit of spreadsheets
        while len(row) > len(header) and not row[-1].strip():
            row = row[:-1]
        if len(row) != len(header):
            raise DataError(
                f"{where}: expected {len(header)} columns as in the header, got {len(row)}"
            )
        record = dict(zip(header, row, strict=True))
        yield where, {**record, "prompt": record[column].strip()}


def _header(row: list[str], where: str) -> list[str]:
    """Return the names of a header's columns; several without a name are numbered."""
    header = _stripped(row)
    if header.count("") > 1:
        header = [name or f"column {number}" for number, name in enumerate(header, 1)]
    if len(set(header)) != len(header):
        raise DataError(
            f"{where}: expected column names that differ, got {', '.join(map(repr, header))}"
        )
    return header


def csv_rows(text: str, file: str, delimiter: str) -> Iterator[Row]:
    """Yield the rows of a table that are not blank. Raises DataError for a broken one."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    start = 1
    try:
        # a cell may hold line breaks: a row is named by its first line
        for row in reader:
            where, start = f"{file}, line {start}", reader.line_num + 1
            if any(cell.strip() for cell in row):
                yield where, row
    except csv.Error as error:
        raise DataError(
            f"{file}, line {start}: expected comma or tab separated values, got a broken row: "
            f"{error}"
        ) from error


def _tab_rows(text: str, file: str) -> list[Row] | None:
    """Read lines with a tab between two cells; None where they are no such lines, but CSV with
    tabs. A quote is a letter like any other, unless all cells that begin with one are quoted as
    CSV has it."""
    rows: list[Row] = []
    for number, line in enumerate(_cut(text), 1):
        if line.strip():
            rows.append((f"{file}, line {number}", line.split("\t")))
    if not rows:
        return None
    header = [*map(_unquoted, _stripped(rows[0][1]))]
    name, least = prompt_name(header), len(header)
    if name is not None:
        least = header.index(name) + 1
    for _, row in rows:
        # editors cut tabs off the ends of lines
        cut = least <= len(row) < len(header) and '"' not in "".join(row)
        if cut:
            row += [""] * (len(header) - len(row))
        if len(row) != len(header):
            return None
    cells = [cell.strip() for _, row in rows for cell in row]
    if all(_QUOTED.fullmatch(cell) for cell in cells if cell.startswith('"')):
        return [(where, [*map(_unquoted, row)]) for where, row in rows]
    return rows


def _without_header(text: str, file: str, delimiters: str) -> Items:
    """Yield prompts of a table without a header, where nothing else can be in it. Raises
    DataError."""
    numbered = list(_lines(text, file))
    if not numbered:
        return
    place, lines = numbered[0][0], [line for _, line in numbered]
    for one in _RARE:
        if one not in delimiters and _in_each(one, lines):
            raise _unread(place, f"columns with {one!r} between them", _other_separator(one))
    first = max((first_row(text, one) for one in delimiters), key=len)
    cells = list(filter(None, first))
    # words alone, and longer lines below them, are names of columns
    named = all(map(_WORD.fullmatch, cells))
    named = named and (len(cells) > 1 or any(" " in line for line in lines[1:]))
    alone = None
    if not named:
        alone = _prompts_alone(text, file, delimiters)
    if alone is None:
        raise no_prompt(place, "a column named prompt or caption or text", first)
    yield from alone


def _prompts_alone(text: str, file: str, delimiters: str) -> list[tuple[str, Any]] | None:
    """Return the cells of a table's only column, or lines whose commas are those of a sentence;
    None where there may be other columns."""
    lines = list(_lines(text, file))
    for one in delimiters.replace(",", ""):
        counts = {line.count(one) for _, line in lines}
        if counts != {0} and (one == "\t" or (len(counts) == 1 and f"{one} " not in text)):
            return None
    # one cell in each row, maybe quoted
    try:
        rows = list(csv_rows(text, file, delimiters[0]))
    except DataError:
        rows = []
    found = []
    for where, row in rows:
        found.append((where, "".join(row).strip()))
        if sum(bool(cell.strip()) for cell in row) != 1:
            found = []
            break
    if found:
        return found
    # or a sentence in each line
    for where, line in lines:
        whole = bool(_QUOTED.fullmatch(line))
        if not whole and ("," in _PROSE.sub("", line) or '",' in line):
            return None
        found.append((where, _unquoted(line)))
    return found


_READERS: dict[str, Callable[[str, str], Items]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_txt,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}

ENDINGS = tuple(_READERS)


def _json(text: str, where: str) -> Any:
    # NaN is what pandas writes where a cell is empty
    return parse_json(text, where, error=DataError, constants=True)


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
    column = prompt_name(row)
    if column is None:
        raise no_prompt(f"hub:{name}", "a column named prompt or caption or text", row)
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
        if "train" in found:
            return found["train"]
        if len(found) > 1:
            raise ConfigError(f"hub:{name}: expected one of the splits {', '.join(found)} after @")
        (found,) = found.values()
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
            yield place, labelled(item, {"tag": file.stem})


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
