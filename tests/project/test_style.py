"""Rules of style that no linter holds: one comprehension a line, files of at most 700 lines,
functions of at most 60, outside of tests with a body of at most 50."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest
from docskit import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOMS = ("flowrl", "rewards", "scripts", "tests")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Parse a source, once for all rules -> all that is in it that a rule is about."""
    kinds = (*COMPREHENSIONS, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))


def crowded(source: str) -> list[int]:
    """Return the lines on which more than one comprehension has its first `for`."""
    nodes = [node for node in nodes_of(source) if isinstance(node, COMPREHENSIONS)]
    lines = Counter(node.generators[0].target.lineno for node in nodes)
    return sorted(line for line, count in lines.items() if count > 1)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a = [x for x in y]\nb = {x for x in y}", []),
        ("a = [[x for x in y] for y in z]", [1]),
        ("a = any(x for x in y) or all(x for x in y)", [1]),
        ("a = [\n    [x for x in y]\n    for y in z\n]", []),
        ("a = {x: y for x, y in z if x for y in x}", []),
    ],
)
def test_what_is_crowded(source: str, lines: list[int]) -> None:
    """Counted by eye."""
    assert crowded(source) == lines


def test_at_most_one_comprehension_a_line() -> None:
    found = {str(path.relative_to(ROOT)): crowded(path.read_text()) for path in FILES}
    assert len(FILES) > 600 and {name: lines for name, lines in found.items() if lines} == {}


def lengths(source: str) -> dict[str, tuple[int, int]]:
    """Return how many lines each function has, and how many its body without the docstring."""
    found = {}
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            last = node.body[-1].end_lineno
            assert last is not None
            found[node.name] = last - node.lineno + 1, last - first.lineno + 1
    return found


def test_how_long_a_function_is() -> None:
    """Counted by eye."""
    source = (
        'def a(\n    b,\n):\n    """Of\n    two."""\n    c = [\n        b,\n    ]\n    return c\n'
    )
    assert lengths(source) == {"a": (9, 4)}
    assert lengths('def a():\n    """One."""\n') == {"a": (2, 1)}


def test_no_function_is_long() -> None:
    found = {str(path.relative_to(ROOT)): lengths(path.read_text()) for path in FILES}
    long = []
    for file, functions in found.items():
        most = 60 if file.startswith("tests/") else 50
        long += [(file, name, *k) for name, k in functions.items() if k[0] > 60 or k[1] > most]
    assert long == []


def test_no_file_is_long() -> None:
    found = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines > 700} == {}
