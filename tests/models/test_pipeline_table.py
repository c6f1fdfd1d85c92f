"""The table of docs/pipelines.md is what the classes show now."""

from __future__ import annotations

import diffusers
import pytest
from docskit import ROOT
from pipelinetable import MAPPINGS, classes, row, why_not
from tinypipelines import TINY

PAGE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")


def line(name: str, found: tuple[str, str, str]) -> str:
    return f"| {name.removesuffix('Pipeline')} | {' | '.join(found)} |"


def test_every_class_of_the_mappings_has_a_line() -> None:
    names = {name for names in classes().values() for name in names}
    assert len(MAPPINGS) == 4 and len(names) > 80
    missing = [name for name in names if f"| {name.removesuffix('Pipeline')} |" not in PAGE]
    assert missing == []


@pytest.mark.parametrize("name", sorted(TINY))
def test_what_a_class_shows_is_in_the_table(name: str) -> None:
    assert line(name, row(name)) in PAGE


def test_what_is_refused_by_its_class_is_in_the_table() -> None:
    untried = [n for names in classes().values() for n in names if n not in TINY]
    assert len(untried) > 50
    for name in untried:
        if why_not(getattr(diffusers, name)):
            assert line(name, row(name)) in PAGE
