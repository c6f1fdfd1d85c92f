"""Estimate the shipped configs for released models.

    python scripts/research/estimates.py                          # all of them
    python scripts/research/estimates.py --only flux/flow_grpo    # these; the rest stays as it is

Writes assets/results/estimates.json; `python scripts/research/tables.py` makes the table of
docs/memory.md from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from flowrl.core.files import write_json
from flowrl.cost.table import estimate_configs, merged, put_into_page, released_configs

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "estimates.json", ROOT / "docs" / "memory.md"


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the table of docs/memory.md."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    return [(PAGE, lambda text: put_into_page(text, results))]


def main() -> None:
    """Estimate all configs, or add and refresh those that are named."""
    parser = argparse.ArgumentParser(description="Estimate the shipped configs.")
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="such as flux/flow_grpo")
    names = parser.parse_args().only
    result = estimate_configs(names or released_configs())
    if names:
        result = merged(json.loads(RESULT.read_text(encoding="utf-8")), result)
    write_json(RESULT, result)
    print(f"{RESULT}; now run python scripts/research/tables.py")


if __name__ == "__main__":
    main()
