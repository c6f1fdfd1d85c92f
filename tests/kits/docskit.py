"""Read the documentation, and what the code offers, for the tests that compare the two."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml

from flowrl.cli.main import app
from flowrl.config.axes import AXES
from flowrl.config.calls import fits, offers, settable_of

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = "required"


def _read() -> dict[str, str]:
    files = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


PAGES = _read()
"""Path from the root -> text, of every page."""

# --------------------------------------------------------------------------------- reading Markdown


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def section(page: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n(.*)", page, re.MULTILINE | re.DOTALL)
    assert match, f"no heading {heading!r}"
    return re.split(rf"^#{{1,{len(match[1])}}} ", match[2], flags=re.MULTILINE)[0]


def tables(page: str, first: str) -> list[list[list[str]]]:
    """Return the tables whose first column is named `first`, as rows of cells with the head."""
    found = []
    for text in re.findall(r"(?:^\|.*\|\n)+", prose(page) + "\n", re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
        rows = [list(map(str.strip, line)) for line in lines]
        if rows[0][0] == first:
            assert {len(row) for row in rows} == {len(rows[0])}, f"ragged table {rows[0]}"
            found.append([rows[0], *rows[2:]])
    return found


def rows(page: str, first: str) -> list[list[str]]:
    """Return the rows below the heads of all tables whose first column is named `first`."""
    found = [row for table in tables(page, first) for row in table[1:]]
    assert found, f"no table with a column {first!r}"
    return found


def spans(text: str) -> list[str]:
    """Return the `code` in a text."""
    return re.findall(r"`([^`]+)`", text)


def names(page: str, first: str) -> list[str]:
    """Return the `code` in the first column of the tables named so."""
    return [name for row in rows(page, first) for name in spans(row[0])]


def slug(heading: str) -> str:
    """Turn a heading into the anchor that GitHub gives it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of every line of every shell block."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def documented(cell: str) -> Any:
    """Read a cell of a default column: `required`, or one YAML value in code."""
    if cell == REQUIRED:
        return REQUIRED
    (code,) = spans(cell)
    return yaml.safe_load(code)


# ---------------------------------------------------------------------------- what the code offers

FLOWRL: Any = typer.main.get_command(app)  # a click group
"""The command `flowrl`."""


def parse(words: list[str]) -> dict[str, Any]:
    """Parse `flowrl COMMAND ...` -> its arguments. Raises click's UsageError if it is wrong."""
    if words[1].startswith("-"):
        assert words[1] in [name for p in FLOWRL.params for name in p.opts], words
        return {}
    command = FLOWRL.commands[words[1]]
    with command.make_context(words[1], words[2:]) as context:
        return dict(context.params)


def options(command: str) -> set[str]:
    """Return the options of a command, as they are written."""
    return {name for parameter in FLOWRL.commands[command].params for name in parameter.opts}


@cache
def offered() -> dict[str, dict[str, dict[str, Any]]]:
    """Return {axis: {function: {argument: default or "required"}}}, what a config can name."""
    found: dict[str, dict[str, dict[str, Any]]] = {axis: {} for axis in AXES}
    for name, axis in AXES.items():
        for path, function in offers(axis, "docs").items():
            if fits(axis, function):
                settable = settable_of(name, path, function)
                arguments = {key: plain(value.default) for key, value in settable.items()}
                found[name][path.rpartition(".")[2]] = arguments
    return found


def plain(default: Any, missing: Any = inspect.Parameter.empty) -> Any:
    """Return a default as YAML would give it; "required" where there is none."""
    if default is missing:
        return REQUIRED
    return list(default) if isinstance(default, tuple) else default


# ----------------------------------------------------------------------------------------- examples

SMALL: dict[str, dict[str, Any]] = {
    "train": {"iterations": 1, "prompts": 2, "group": 8, "updates": 1},
    "eval": {"steps": 1, "images": 1, "every": 0},
    "samples": {"prompts": 1, "every": 0},
}


def made_small(train: Any) -> Any:
    """Return `flowrl.train`, only with so little to do that an example takes seconds."""

    def small(*args: Any, **given: Any) -> Any:
        for section, values in SMALL.items():
            given[section] = {**given.get(section, {}), **values}
        return train(*args, **given)

    return small
