"""Rules of style that no linter holds: one comprehension a line, functions of at most 50 lines."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from docskit import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ROOMS = ("flowrl", "rewards", "scripts", "tests")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
SOURCE = [path for path in FILES if path.relative_to(ROOT).parts[0] in ROOMS[:2]]


def crowded(source: str) -> list[int]:
    """Return the lines on which more than one comprehension has its first `for`."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, COMPREHENSIONS)]
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
    assert len(FILES) > 800 and {name: lines for name, lines in found.items() if lines} == {}


def bodies(source: str) -> dict[str, int]:
    """Return how many lines the body of each function has, without its docstring."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            last = node.body[-1].end_lineno
            assert last is not None
            found[node.name] = last - first.lineno + 1
    return found


def test_how_long_a_body_is() -> None:
    """Counted by eye."""
    source = (
        'def a(\n    b,\n):\n    """Of\n    two."""\n    c = [\n        b,\n    ]\n    return c\n'
    )
    assert bodies(source) == {"a": 4}
    assert bodies('def a():\n    """One."""\n') == {"a": 1}


def test_no_function_is_long() -> None:
    found = {str(path.relative_to(ROOT)): bodies(path.read_text()) for path in SOURCE}
    long = {f"{p}: {n}": k for p, names in found.items() for n, k in names.items() if k > 50}
    assert long == {}
