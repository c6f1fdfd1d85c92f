"""What stands for a source: what computes, not what explains it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from flowrl.core.identity import facts_of_source

PLAIN = 'def judge(x):\n    text = """# one\n\n    two"""\n    return len(text) * x\n'


def _facts(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Return what stands for a module with this source."""
    (folder / "judged_here.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("judged_here", None)
    importlib.invalidate_caches()
    found = facts_of_source(importlib.import_module("judged_here").judge)
    return str(found["judged_here"])


@pytest.mark.parametrize(
    ("source", "same"),
    [
        (PLAIN.replace("def", '"""A page."""\ndef', 1), True),
        (PLAIN.replace("    text", '    """Say it."""\n    text', 1), True),
        (PLAIN.replace("    text", "    # as it is\n    text", 1).replace("* x", "* x  # ä"), True),
        (PLAIN.replace("# one", "# 1"), False),
        (PLAIN.replace("\n\n    two", "\n    two"), False),
        (PLAIN.replace("* x", "* x + 1"), False),
        (PLAIN + '\njudge.page = """A text."""\n', False),
    ],
)
def test_comments_and_docstrings_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, same: bool
) -> None:
    before = _facts(tmp_path, monkeypatch, PLAIN)
    assert (_facts(tmp_path, monkeypatch, source) == before) is same


@pytest.mark.parametrize(
    "source",
    [
        'def judge(x):\n    """Ä page."""; return 1\n',
        'def judge(x): "A page."; return 1\n',
        '"""A page."""; judge = lambda x: 1\njudge.__module__ = __name__\n',
    ],
)
def test_code_beside_a_docstring_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    before = _facts(tmp_path, monkeypatch, source)
    assert _facts(tmp_path, monkeypatch, source.replace("1", "2")) != before


def test_a_docstring_that_is_read_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = '"""How good is it?"""\ndef judge(x):\n    return __doc__\n'
    before = _facts(tmp_path, monkeypatch, one)
    assert _facts(tmp_path, monkeypatch, one.replace("good", "bad")) != before
