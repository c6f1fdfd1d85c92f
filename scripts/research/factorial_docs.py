"""The tables of the factorial experiments in docs/factorial.md, from their result files.

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
PAGE = ROOT / "docs" / "factorial.md"
RESULTS = {"factorial": "factorial-80000.json", "clip": "clip-updates.json"}
"""Each experiment's file, by the name of its marks."""


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page and what fills it."""
    return [(PAGE, filled)]


def filled(text: str) -> str:
    """Put the effects and what is to be known of them between their marks."""
    for name, file in RESULTS.items():
        found = read_factorial(ROOT / "assets" / "results" / file)
        notes = [wrapped(f"- {line}", "  ") for line in factorial_notes(found)]
        parts = [markdown_table(effect_rows(found)), "\n".join(notes)]
        text = between(text, f"{name}: table", f"{name}: end", parts)
    return text
