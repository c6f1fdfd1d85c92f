"""Estimate the shipped configs for released models.

    python scripts/research/estimates.py

Writes assets/results/estimates.json; `python scripts/research/tables.py` makes the table of
docs/memory.md from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flowrl.core.files import write_json
from flowrl.cost.table import collect, page

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "estimates.json", ROOT / "docs" / "memory.md"


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the table of docs/memory.md."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    return [(PAGE, lambda text: page(text, results))]


if __name__ == "__main__":
    write_json(RESULT, collect())
    print(f"{RESULT}; now run python scripts/research/tables.py")
