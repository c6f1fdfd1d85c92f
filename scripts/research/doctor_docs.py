"""Write the table of docs/doctor.md: the catalogue of findings.

`python scripts/research/tables.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flowrl.core.tables import markdown_table
from flowrl.doctor.findings import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "doctor.md"


def _filled(text: str, name: str, inside: str) -> str:
    mark, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found, rest = text.partition(mark)
    tail = rest.partition(end)[2]
    return f"{head}{mark}\n\n{inside}\n\n{end}{tail}" if found else text


def findings(text: str) -> str:
    """Fill in the catalogue."""
    rows = [[f"`{name}`", one.means, one.change] for name, one in CATALOGUE.items()]
    return _filled(
        text, "findings", markdown_table([["finding", "it means", "change"], *rows], left=3)
    )


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the page."""
    return [(PAGE, findings)]
