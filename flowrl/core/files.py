"""Write files and folders whole or not at all, and read JSON that a stranger may have written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from flowrl.core.errors import RunError

STDOUT = Path("-")
MOST_LINKS = 40  # as the system follows
WIDTH = 100  # of a line of JSON that could be broken


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    what: str = "",
    durable: bool = False,
    overwrite_folder: bool = False,
) -> Iterator[Path]:
    """Hand out a new path beside `path`; the file or folder made there takes `path`'s place.

    So a reader sees the old contents or the new ones, never a half. If anything is raised inside,
    `path` stays as it was and the draft is deleted. Missing folders above `path` are made. Links
    are followed: what they lead to is exchanged. A device or a pipe cannot be: there the path
    itself is handed out and written in place. ``-`` is standard output.

    Args:
        path: of the final file or folder. what: its name in messages, by default the path.
        durable: flush all of it to the disk before and after the exchange, so that the promise
        also holds after a power cut. overwrite_folder: exchange a folder that holds something,
        too; without this it is an error, and an empty folder is filled.
    Raises RunError with the system's reason, for example a full disk.
    """
    path = Path(path)
    try:
        # what is no file that can be exchanged
        if is_stdout(path):
            with _copied_to_stdout() as draft:
                yield draft
            return
        if _in_place(path):
            yield path
            return
        # a draft beside it, or beside what a link leads to
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # a loop of links leads nowhere: OSError says it, `resolve` something else
        path = path.resolve()
        _make_folder(path.parent)
        draft = path.with_name(f"{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            yield draft
            if path.is_file() and draft.is_file():
                shutil.copymode(path, draft)
            if durable:
                _flush(draft)
            _exchange(draft, path, overwrite_folder=overwrite_folder)
            if durable:
                sync(path.parent)
        finally:
            delete(draft)
    except Exception as error:
        # safetensors, which need not be loaded, reports a full disk as its own error
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot write {what or path}: {reason}; nothing half-written was kept"
        ) from error


_DRAFT = re.compile(r".+\.tmp-\d+-[0-9a-f]{8}")


def delete_drafts(folder: Path) -> None:
    """Delete what `replacing` left in a folder, not below it, when its process was killed; only for
    a folder that nobody else writes into."""
    for path in sorted(folder.glob("*.tmp-*")):
        if _DRAFT.fullmatch(path.name):
            delete(path)


MOST_JSON = 2**28  # bytes of a JSON file
DEEPEST = 64  # lists and objects in one another
LARGEST = sys.float_info.max
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_text(path: Path) -> str:
    """Read a text. Raises OSError, also for a pipe or a device, which might never end."""
    refuse_pipe(path)
    return path.read_text(encoding="utf-8")


def read_json(
    path: str | os.PathLike[str],
    shape: Any = None,
    *,
    error: type[Exception] = RunError,
    constants: bool = False,
) -> Any:
    """Read a JSON file that anybody may have written, as `parse_json` does -> its value, which has
    the `shape`: a type as pydantic checks it, such as ``dict[str, float]``.

    Raises FileNotFoundError; `error` with file, reason and mend for anything else.
    """
    path = Path(path)
    try:
        refuse_pipe(path)
        if path.stat().st_size > MOST_JSON:
            raise OSError(f"it has more than {MOST_JSON >> 20} MiB")
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as raised:
        raise error(f"cannot read {path}: {raised.strerror or raised}") from raised
    found = parse_json(data, str(path), error=error, constants=constants)
    return found if shape is None else shaped(found, shape, str(path), error=error)


def parse_json(
    data: str | bytes | bytearray,
    where: str,
    *,
    error: type[Exception] = RunError,
    constants: bool = False,
    values: bool = True,
) -> Any:
    """Parse JSON so that no later step can fall over it: UTF-8, no key twice in an object, no
    number beyond float64, at most DEEPEST lists and objects in one another, whole characters.

    constants: take NaN and Infinity, which Python writes. values=False: numbers beyond float64 and
    halves of characters are let through, for a caller that says of which value they are. Raises
    `error` with place and reason.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": _constant}
    if values:
        hooks |= {"parse_float": _float, "parse_int": _int}
    if constants:
        hooks["parse_constant"] = float
    try:
        if not isinstance(data, str):  # json would guess UTF-16 and UTF-32, too
            data = bytes(data).decode("utf-8-sig")
        found = json.loads(data, **hooks)
        # a look inside only where the text can hold what is looked for
        if data.count("[") + data.count("{") > DEEPEST or "\\u" in data:
            _check_inside(found, characters=values)
    except json.JSONDecodeError as raised:
        if raised.lineno > 1:
            where += f", line {raised.lineno}"
        raise error(
            f"{where}, column {raised.colno}: expected JSON, got a fault in it: {raised.msg}"
        ) from raised
    except RecursionError as raised:
        raise error(f"{where}: expected JSON, got lists or objects nested too deeply") from raised
    except ValueError as raised:  # not UTF-8, a number of thousands of digits, a key twice
        raise error(f"{where}: expected JSON, got what cannot be read: {raised}") from raised
    return found


def shaped(value: Any, shape: Any, where: str, *, error: type[Exception] = RunError) -> Any:
    """Return a value of JSON as it is, if it has the `shape`, a type as pydantic checks it. Raises
    `error` that names the first place that has not."""
    # imported where it is needed: most commands start without it
    from pydantic import ValidationError

    try:
        _adapter(shape).validate_python(value, strict=True)
        return value
    except ValidationError as raised:
        first = raised.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        if place:
            where += f": {place}"
        got = shortened(repr(first["input"]))
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise error(f"{where}: {said}, got {got}") from raised


@cache
def _adapter(shape: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)


def shortened(text: str, most: int = 60) -> str:
    """Cut a text for a message."""
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shortened(key)!r} stands twice in an object")
            seen.add(key)
    return found


def _float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{shortened(text)} is no finite number")
    return number


def _int(text: str) -> int:
    # beyond 309 digits no float64 holds it, and Python refuses to print it
    if len(text) > 310 or abs(number := int(text)) > LARGEST:
        raise ValueError(f"{shortened(text)} is no finite number of 64 bits")
    return number


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON; write null in its place, or delete the line")


def _check_inside(value: Any, *, characters: bool) -> None:
    """Raise RecursionError for what is nested too deeply, ValueError for half a surrogate pair,
    which no file can hold as UTF-8."""
    level = [value]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
            elif characters and isinstance(one, str) and _SURROGATE.search(one):
                raise ValueError(f"half of a surrogate pair in {shortened(ascii(one))}")
        if not below:
            return
        level = below
    raise RecursionError


def refuse_pipe(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a pipe or a device: reading it might never end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("expected a file, got a pipe or a device")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all. Raises RunError."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_text` does. Raises RunError."""
    write_text(path, json_text(value) + "\n")


def json_text(value: Any) -> str:
    """Return a value as JSON to be read: indented where it does not fit in a line. A list of
    numbers stands on one line however long it is."""
    return _lines(json.loads(json.dumps(value)), "", 0)


def _lines(value: Any, indent: str, taken: int) -> str:
    """Write what came out of JSON, behind so many columns of a line that begins with an indent."""
    # one line: what fits with a comma behind it, and numbers
    line = json.dumps(value)
    if taken + len(line) < WIDTH or not isinstance(value, dict | list):
        return line
    if isinstance(value, list) and _is_flat(value):
        return line
    # a line for each item
    deeper, items = indent + "  ", []
    if isinstance(value, list):
        (first, last), named = "[]", [("", item) for item in value]
    else:
        (first, last), named = "{}", [(f"{json.dumps(key)}: ", value[key]) for key in value]
    for name, item in named:
        start = deeper + name
        items.append(start + _lines(item, deeper, len(start)))
    return "\n".join([first, ",\n".join(items), indent + last])


def _is_flat(values: Iterable[Any]) -> bool:
    """Say whether a list holds numbers, switches and nulls alone."""
    return all(item is None or isinstance(item, int | float) for item in values)


def is_finite_number(value: Any) -> TypeGuard[float]:
    """Say whether what was read from JSON is a number, no switch, that float64 holds."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond float64
        return False


def only(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return an object of JSON with these keys alone, all of which it has."""
    return {key: values[key] for key in keys}


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return an object of JSON without some keys, which it need not have."""
    return {key: value for key, value in values.items() if key not in keys}


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON has it: None in place of NaN and infinity, a whole one as it is."""
    if value is None or not math.isfinite(value):
        return None
    if isinstance(value, int):
        return value
    return float(value)  # also one of numpy's


def delete(path: Path) -> None:
    """Delete a file or a folder as far as the system lets; it need not be there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def is_stdout(path: str | os.PathLike[str]) -> bool:
    """Say whether a path means standard output: ``-``, or a name of it such as /dev/stdout."""
    path = Path(path)
    if path == STDOUT or not _is_of_the_system(path):
        return path == STDOUT
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


@contextlib.contextmanager
def _copied_to_stdout() -> Iterator[Path]:
    """Hand out a path; what is written there goes to standard output when it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft"
        yield draft
        sys.stdout.flush()
        sys.stdout.buffer.write(draft.read_bytes())
        sys.stdout.flush()


def _in_place(path: Path) -> bool:
    """Say whether `path` is, or leads to, what cannot be exchanged: a device, a pipe, an open
    file of a process."""
    for _ in range(MOST_LINKS):
        if _is_of_the_system(path) or not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return _is_of_the_system(path) or (path.exists() and not path.is_file() and not path.is_dir())


def _is_of_the_system(path: Path) -> bool:
    """Say whether a path is below /dev or /proc, where names are not those of files; /dev/shm is a
    folder in memory like any other."""
    if not path.is_absolute() or path.parts[1:3] == ("dev", "shm"):
        return False
    return path.parts[1:2] in (("dev",), ("proc",))


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it; one of them may be a file by mistake."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # "File exists" would be no help
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _exchange(draft: Path, path: Path, *, overwrite_folder: bool) -> None:
    """Put the draft in the place of `path`; if that fails, what was there is back."""
    if not (overwrite_folder and path.is_dir()):
        os.replace(draft, path)
        return
    # a folder that holds something cannot be renamed over: it steps aside
    old = path.with_name(draft.name.replace(".tmp-", ".old-"))
    os.replace(path, old)
    try:
        os.replace(draft, path)
    except OSError:
        os.rename(old, path)
        raise
    delete(old)


def _flush(path: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for inside in sorted(path.rglob("*")):
        sync(inside)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
