"""Write every table and figure of the docs that is made from code or from a result file.

    python scripts/results/tables.py            # write what is stale
    python scripts/results/tables.py --check    # only name it; exit code 1 if there is any

Whoever adds such a table adds its module to PARTS: a module with `targets()`, which returns pairs
of a file and a function from the file's present text to the true one. One that draws figures has
`pictures()`, which returns `Picture`s of `pictures.py`: each PNG holds the numbers that it shows.
`tests/project/test_tables.py` fails while something is stale.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "config_docs",
    "method_docs",
    "pairs",
    "gains",
    "methods_table",
    "claims",
    "transfer",
    "student",
    "methods_figures",
    "hacking",
    "hacking_figure",
    "votes",
    "sizes",
    "quickstart",
    "demonstrated",
    "estimates",
    "first_gpu_run",
    "measured_docs",
    "rooms",
)
"""Modules beside this one, in the order in which they fill a file that they share."""

Fill = Callable[[str], str]


def modules() -> list[ModuleType]:
    """Import all parts."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        return [importlib.import_module(name) for name in PARTS]
    finally:
        sys.path.pop(0)


def targets() -> dict[Path, list[Fill]]:
    """Return what fills each file."""
    found: dict[Path, list[Fill]] = {}
    for module in modules():
        for path, fill in module.targets():
            found.setdefault(path, []).append(fill)
    return found


def stale_pictures() -> list[Any]:
    """Return the figures that show other numbers than the true ones."""
    found: list[Any] = []
    for module in modules():
        if hasattr(module, "pictures"):
            found += [picture for picture in module.pictures() if not picture.true()]
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
    drawn = stale_pictures()
    for picture in drawn:
        if not check:
            picture.write()
        print(f"{'stale' if check else 'drawn'}: {picture.path.relative_to(ROOT)}")
    if not (found or drawn):
        print("every table is up to date")
    return int(check and bool(found or drawn))


if __name__ == "__main__":
    sys.exit(main())
