"""The table of docs/compare.md of published functions that were run beside ours.

The source is assets/results/published-code.json, which published_code/compare.py writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured import between

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "published-code.json", ROOT / "docs" / "compare.md"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Lay out a row for each quantity."""
    out = [["published", "commit", "ours", "quantity", "largest difference", "largest value"]]
    for case in result["cases"].values():
        theirs = f"[{case['functions'][0]}]({address(case)}) of {case['repository']}"
        for what, found in case["gaps"].items():
            numbers = [f"{found['difference']:.0e}", f"{found['value']:.2g}"]
            out.append([theirs, case["commit"][:7], case["ours"], what, *numbers])
    return out


def address(case: dict[str, Any]) -> str:
    """Return where the file is read on the web."""
    return f"https://github.com/{case['repository']}/blob/{case['commit']}/{case['path']}"


def filled(text: str) -> str:
    """Put the table between its marks."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    table = markdown_table(rows(result), left=4)
    return between(text, "published code: table", "published code: end", [table])


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page and what fills it."""
    return [(PAGE, filled)]
