"""The factorial experiment's table in docs/compare.md, from its result file.

`python scripts/research/tables.py` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from measured import between, wrapped

from flowrl.core.tables import markdown_table
from flowrl.runs.compare.effects import effect_rows
from flowrl.runs.compare.factorial import factorial_notes, read_factorial

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "factorial-shapes.json", ROOT / "docs" / "compare.md"


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page and what fills it."""
    return [(PAGE, filled)]


def filled(text: str) -> str:
    """Put the effects and what is to be known of them between their marks."""
    parts = []
    if RESULT.exists():
        found = read_factorial(RESULT)
        notes = [wrapped(f"- {line}", "  ") for line in factorial_notes(found)]
        parts = [markdown_table(effect_rows(found)), "\n".join(notes)]
    return between(text, "factorial: table", "factorial: end", parts)
