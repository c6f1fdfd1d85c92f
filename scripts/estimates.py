"""Estimate the shipped configs for released models, and write the table of docs/memory.md; `--check` only compares.

    python scripts/estimates.py

Writes assets/results/estimates.json and, from it, the table. With --check nothing is estimated: the page is compared
with the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from flowrl.estimate_table import collect, page
from flowrl.loop import write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = ROOT / "assets" / "results" / "estimates.json", ROOT / "docs" / "memory.md"


def main() -> int:
    """Write, or say whether the page is stale -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    args = parser.parse_args()
    if not args.check:
        write_json(RESULT, collect())
    text = PAGE.read_text(encoding="utf-8")
    filled = page(text, json.loads(RESULT.read_text(encoding="utf-8")))
    if args.check:
        print("stale" if filled != text else "up to date")
        return int(filled != text)
    write_text(PAGE, filled)
    print(f"{RESULT}\n{PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
