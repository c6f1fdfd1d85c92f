"""Write the table of docs/pipelines.md: ``python scripts/results/pipelines.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/pipelines.md"
START, END = "<!-- pipelines: table -->\n", "<!-- pipelines: end -->\n"


def page(table: str) -> str:
    """Return the page with another table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/kits")]
    from pipelinetable import table

    PAGE.write_text(page(table()), encoding="utf-8")
