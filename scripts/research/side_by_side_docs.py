"""The tables of docs/compare.md of the same work in public trainers and in flowrl.

The sources are assets/results/side-by-side-*.json, which side_by_side/side_by_side.py writes.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "assets" / "results", ROOT / "docs" / "compare.md"
MARK = re.compile(r"<!-- side by side -->\n.*?<!-- side by side: end -->", re.DOTALL)
PHASES = ("sampling", "decoding", "training", "between", "all")


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    """Say what one file holds: a row for each trainer."""
    rows = []
    # seconds, network calls, rows, memory, and the ratio to the trainer beside
    for name, found in result["trainers"].items():
        calls, seen = sum(found["calls"].values()), sum(found["rows"].values())
        share = result["ratios"].get(name)
        rows.append(
            [
                name,
                *(f"{found['seconds'][phase]:.2f}" for phase in PHASES),
                f"{min(found['all']):.2f} to {max(found['all']):.2f}",
                str(calls),
                str(seen),
                f"{found['peak_MiB']:.0f}",
                f"{share['all']:.2f}" if share else "1",
            ]
        )
    return rows


def told(result: dict[str, Any]) -> str:
    """Say what the work was."""
    work = result["work"]
    # what every work has
    parts = [
        f"{work['prompts']} prompt{'s' * (work['prompts'] > 1)}",
        f"{work['group']} images each",
        f"{work['steps']} steps",
        f"{work['size']} pixels",
        f"guidance {work['guidance']:g}",
    ]
    # what only some have
    if work["kl"]:
        parts.append(f"KL {work['kl']:g}")
    if work.get("window"):
        parts.append(f"noise in a window of {work['window']} steps")
    if work.get("splits"):
        parts.append(f"splits at steps {work['splits'].replace(',', '/')}")
    if work.get("updates", 1) > 1:
        parts.append(f"{work['updates']} optimizer steps")
    parts.append(f"{work['batch']} sample{'s' * (work['batch'] > 1)} in a network call")
    changed = " with uncommitted changes" if result["commit"].endswith("-dirty") else ""
    text = (
        f"`{result['trainer']}` at {result['commit'][:8]}{changed} on {work['model']}: "
        f"{', '.join(parts)}, "
        f"{work['dtype']}; "
        f"{result['rounds']} round{'s' * (result['rounds'] > 1)}, the {result['clock']}'s seconds."
    )
    return textwrap.fill(text, 100)


def filled(text: str) -> str:
    """Put the tables between the marks."""
    head = ["trainer", *PHASES, "range", "network calls", "rows", "peak MiB", "share"]
    parts = []
    for file in sorted(RESULTS.glob("side-by-side-*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        parts.append(f"{told(result)}\n\n{markdown_table([head, *rows_of(result)])}")
    body = "\n\n".join(part.strip() for part in parts)
    found = f"<!-- side by side -->\n{body}\n<!-- side by side: end -->"
    return MARK.sub(lambda _: found, text)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the tables of docs/compare.md."""
    return [(PAGE, filled)]
