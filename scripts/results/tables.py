"""Write every table and figure of the docs that is made from code or from a result file.

    python scripts/results/tables.py            # write what is stale
    python scripts/results/tables.py --check    # only name it; exit code 1 if there is any

Whoever adds such a table adds its module to PARTS: a module with `targets()`, which returns pairs
of a file and a function from the file's present text to the true one.
`tests/project/test_tables.py` fails while something is stale.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "config_docs",
    "method_docs",
    "pairs",
    "gains",
    "methods",
    "hacking",
    "quickstart",
    "demonstrated",
    "estimates",
    "first_gpu_run",
    "measured_docs",
    "rooms",
)
"""Modules beside this one, in the order in which they fill a file that they share."""

Fill = Callable[[str], str]


def targets() -> dict[Path, list[Fill]]:
    """Return what fills each file."""
    sys.path.insert(0, str(Path(__file__).parent))
    found: dict[Path, list[Fill]] = {}
    try:
        for name in PARTS:
            for path, fill in importlib.import_module(name).targets():
                found.setdefault(path, []).append(fill)
    finally:
        sys.path.pop(0)
    return found


def stale() -> dict[Path, str]:
    """Return the true text of every file that says something else."""
    wrong = {}
    for path, fills in targets().items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        new = old
        for fill in fills:
            new = fill(new)
        if new != old:
            wrong[path] = new
    return wrong


def main() -> int:
    """Write what is stale, or only name it -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    found = stale()
    for path, text in found.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    if not found:
        print("every table is up to date")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
