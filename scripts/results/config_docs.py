"""What the code says of a config's keys, as the tables of docs/config.md and docs/rewards.md.

`python scripts/results/tables.py` writes them. Names, types and defaults are the code's. For plain
sections so is the text. For arguments of functions the last column is written by hand: it stays
with its row, and a row of a new argument has an empty one. A type may say more than the annotation
does ("number in (0, 1]" for a float): such a cell stays, too. Functions that take one argument
alike share a row, "`steps` of `full`, `ode`".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from flowrl.config.axes import AXES
from flowrl.config.calls import settable_of
from flowrl.config.load import ORDER, REQUIRED
from flowrl.config.schema import ABOUT, functions, section_schema
from flowrl.config.sections import SECTIONS
from flowrl.config.values import Schema, choices, plain, schema_of, type_words
from flowrl.models.runtime import Runtime
from flowrl.models.tuning import LoraOptions

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"^\|.*\|\n\|[-| ]+\|\n(?:\|.*\|\n)*", re.MULTILINE)
OPTIONS = {"lora option": LoraOptions, "runtime option": Runtime}
LOOSE = ("text", "mapping", "list", "any value")  # a table may well say more than that
KINDS = {"rewards": "calls by name", "select": "call, or a list of calls", "name": "text"}
NO_DEFAULT = object()
SHARED = {
    **{"device": "auto", "dtype": "float32", "batch": 32},
    **{"references": "", "column": "references", "root": ".", "cache_mb": 1024},
    **{"url": "http://localhost:8080", "api_key_env": None, "timeout": 120.0, "retries": 5},
    **{"backoff": 1.0, "workers": 16, "max_failed": 0.1, "encoding": "png"},
    **{"cache": None, "extra": None},
}
"""Arguments that many rewards take, with the default at which a reward's table leaves them out."""


class Key(NamedTuple):
    """A row of a table: a key with its type and default; the text is None where the page has it."""

    name: str
    kind: str
    default: Any = NO_DEFAULT
    text: str | None = None


def config_page(text: str) -> str:
    """Fill the tables of docs/config.md; again until nothing moves, since rows that are joined may
    change the order of the functions."""
    made = "".join(_sections(text, _config_tables))
    return made if made == text else config_page(made)


def rewards_page(text: str) -> str:
    """Fill the tables of arguments of docs/rewards.md."""
    return "".join(_sections(text, _reward_tables))


def kind_of(schema: Schema) -> str:
    """Say a type as a table does: "whole number >= 1", "`ema` or `current`"; that a number has to
    fit into 31 bits is left out."""
    parts = []
    for branch in schema.get("anyOf", [schema]):
        listed = [f"`{choice}`" for choice in choices(branch)]
        parts += listed or [type_words(branch).removeprefix("a ").removesuffix(" and < 2**31")]
    return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def section_keys() -> list[Key]:
    """Return a row for each section of a config."""
    rows = []
    for key in ORDER:
        kind = KINDS.get(key, "plain" if key in SECTIONS else "call")
        about = SECTIONS[key].__doc__ if key in SECTIONS else ABOUT[key]
        text = about[0].lower() + about[1:].rstrip(".") if about else ""
        default: Any = "all defaults" if key in SECTIONS else "off"
        if key in REQUIRED:
            default = "required"
        shown = {"aggregate": "`weighted_sum`", "optimizer": "`adamw`", "seed": "`0`"}
        kind = "whole number >= 0" if key == "seed" else kind
        rows.append(Key(key, kind, shown.get(key, default), text))
    return rows


def plain_keys(key: str) -> list[Key]:
    """Return a row for each key of a plain section, and of the sections inside."""
    return list(_plain_keys(section_schema(SECTIONS[key]), key, ""))


def _plain_keys(schema: Schema, key: str, prefix: str) -> Iterator[Key]:
    for name, it in schema["properties"].items():
        inner = [one for one in it.get("anyOf", [it]) if "properties" in one]
        for one in inner:
            yield from _plain_keys(one, f"{key}.{name}", f"{key}.{name}.")
        if not inner:
            default = it.get("default", NO_DEFAULT)
            yield Key(f"{prefix}{name}", kind_of(it), default, it["description"])


def argument_keys(axis: str, name: str, prefix: str = "") -> list[Key]:
    """Return a row for each argument of a function of an axis."""
    rows = []
    for argument, it in settable_of(axis, name, functions(axis)[name]).items():
        default = NO_DEFAULT if it.default is inspect.Parameter.empty else plain(it.default)
        rows.append(Key(f"{prefix}{argument}", kind_of(schema_of(it.annotation)), default))
    return rows


def option_keys(record: type[BaseModel]) -> list[Key]:
    """Return a row for each field of a record of options."""
    (known,) = (it for it in schema_of(record | None)["anyOf"] if "properties" in it)
    default = record().model_dump()
    return [Key(name, kind_of(it), default[name]) for name, it in known["properties"].items()]


def _sections(text: str, fill: Callable[[str, str], str]) -> Iterator[str]:
    """Yield a page part by part, a part for each heading, filled."""
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading = re.match(r"#+ (.*)\n", part)
        yield fill(part, heading[1].strip("`") if heading else "")


def _config_tables(part: str, heading: str) -> str:
    for first, record in OPTIONS.items():
        keys = option_keys(record)  # type: ignore[arg-type]
        part = _fill(part, first, lambda old, keys=keys: keys)  # type: ignore[misc]
    part = _fill(part, "section", lambda old: section_keys())
    if heading in SECTIONS:
        return _fill(part, "key", lambda old: plain_keys(heading))
    if heading not in AXES:
        return part

    # a table keeps the functions that it is about; those of no table come into the last one
    tables = [it[0] for it in TABLE.finditer(part) if it[0].startswith("| argument |")]
    shown = [_functions(it) for it in tables]
    if heading != "rewards" and shown:
        named = [name for names in shown for name in names]
        shown[-1] += [name for name in functions(heading) if name not in named]

    def rows(old: dict[str, list[str]]) -> list[Key]:
        mine = shown.pop(0)
        there = [name for name in mine if name in functions(heading)]
        return [row for name in there for row in argument_keys(heading, name, f"{name}.")]

    return _fill(part, "argument", rows)


def _reward_tables(part: str, heading: str) -> str:
    shared = [Key(name, "", default) for name, default in SHARED.items()]
    part = _fill(part, "shared argument", lambda old: shared)
    if heading not in functions("rewards"):
        return part

    def rows(old: dict[str, list[str]]) -> list[Key]:
        keys = argument_keys("rewards", heading)
        return [key for key in keys if key.name in old or not _shared_by_rewards(key)]

    return _fill(part, "argument", rows)


def _shared_by_rewards(key: Key) -> bool:
    """Say whether the page's table of shared arguments has it, with this default."""
    return key.name in SHARED and SHARED[key.name] == key.default


def _fill(part: str, first: str, rows: Callable[[dict[str, list[str]]], list[Key]]) -> str:
    """Write the rows of all tables of a part whose first column has that name."""

    def table(found: re.Match[str]) -> str:
        if not found[0].startswith(f"| {first} |"):
            return found[0]
        head, line, *_ = found[0].splitlines()
        old, columns = _old(found[0]), [cell.strip() for cell in head.strip("|").split("|")]
        made = [(key.name, _cells(key, columns, old.get(key.name, []))) for key in rows(old)]
        lines = []
        for names, cells in _shared(made):
            lines.append(f"| {' | '.join([_written(names), *cells])} |")
        return "\n".join([head, line, *lines, ""])

    return TABLE.sub(table, part)


def _shared(rows: list[tuple[str, list[str]]]) -> list[tuple[list[str], list[str]]]:
    """Join the rows of functions that take an argument alike: the same type and default, and a text
    that is the same or only names another of these rows."""
    found: list[tuple[list[str], list[str]]] = []
    for name, cells in rows:
        _, dot, argument = name.rpartition(".")
        for names, others in found:
            alike = names[0].endswith(f".{argument}") and others[:-1] == cells[:-1]
            known = [f"as `{one}`" for one in names]
            known += [f"as in `{one.rpartition('.')[0]}`" for one in names]
            same = cells[-1] in (others[-1], *known)
            if dot and alike and same:
                names.append(name)
                break
        else:
            found.append(([name], cells))
    return found


def _written(names: list[str]) -> str:
    """Write the first cell of a row: "`full.steps`", or "`steps` of `full`, `ode`"."""
    if len(names) == 1:
        return f"`{names[0]}`"
    argument = names[0].rpartition(".")[2]
    functions = [f"`{name.rpartition('.')[0]}`" for name in names]
    return f"`{argument}` of {', '.join(functions)}"


def row_names(cell: str) -> list[str]:
    """Return the keys that the first cell of a row names."""
    first, *functions = re.findall(r"`([^`]*)`", cell)
    return [f"{function}.{first}" for function in functions] or [first]


def _functions(table: str) -> list[str]:
    """List the functions whose arguments a table has, in its order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in _old(table)))


def _old(table: str) -> dict[str, list[str]]:
    """Return {key: cells after it} of a table as it is."""
    found = {}
    for line in table.splitlines()[2:]:
        key, *cells = (cell.strip() for cell in line[1:-1].split(" | "))
        for name in row_names(key):
            found[name] = cells
    return found


def _cells(key: Key, columns: list[str], old: list[str]) -> list[str]:
    """Return a row's cells after the first; what the page says more exactly than the code stays."""
    cells = dict(zip(columns[1:], old, strict=False))
    text = cells.get(columns[-1], "") if key.text is None else key.text
    made = {"type": _kind(key.kind, cells.get("type", "")), "kind": key.kind}
    made["default"] = _default(key, cells.get("default", ""))
    return [*(made[name] for name in columns[1:-1]), text]


def _kind(made: str, old: str) -> str:
    if not old or "`" in made or re.search(r"[<>]", made):
        return made
    head = re.split(r" or |,", made)[0]
    return old if old.startswith(head) or made.startswith(LOOSE) else made


def _default(key: Key, old: str) -> str:
    """Write a default as YAML; a cell that says the same in another way stays."""
    if key.text is not None and key.default in ("off", "required", "all defaults"):
        return str(key.default)
    if key.default is NO_DEFAULT:
        return "required"
    if key.text is not None and str(key.default).startswith("`"):
        return str(key.default)
    said = re.fullmatch(r"`([^`]*)`", old)
    if said and (read := yaml.safe_load(said[1])) == key.default and read is not (not key.default):
        return old
    if key.default is None and old and not said and old != "required":
        return old
    written = yaml.safe_dump(key.default, default_flow_style=True, width=10**6)
    return f"`{written.removesuffix(chr(10)).removesuffix('...').strip()}`"


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List the pages that have such tables, each with what fills them."""
    pages = {"config.md": config_page, "rewards.md": rewards_page}
    return [(ROOT / "docs" / name, fill) for name, fill in pages.items()]
