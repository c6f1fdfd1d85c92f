"""Write the tables of docs/doctor.md: the catalogue of findings, and what was measured.

`python scripts/research/tables.py` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flowrl.core.tables import markdown_table
from flowrl.doctor.findings import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "doctor.md"
RESULT = ROOT / "assets" / "results" / "doctor.json"


def _filled(text: str, name: str, inside: str) -> str:
    mark, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found, rest = text.partition(mark)
    tail = rest.partition(end)[2]
    return f"{head}{mark}\n\n{inside}\n\n{end}{tail}" if found else text


def findings(text: str) -> str:
    """Fill in the catalogue, a row for each kind; what to change the doctor says itself."""
    kinds: dict[str, list[str]] = {}
    for name, one in CATALOGUE.items():
        kinds.setdefault(name.partition("/")[0], []).append(f"`{name}`: {one.means}")
    rows = [[kind, "; ".join(said)] for kind, said in kinds.items()]
    return _filled(
        text, "findings", markdown_table([["kind", "finding, and what it means"], *rows], left=2)
    )


def measured(text: str) -> str:
    """Fill in what scripts/research/doctor.py found."""
    if not RESULT.exists():
        return text
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    # faults that were named first, then configs without a fault, where it should be silent
    seconds = [row["cpu_seconds"] for row in found["shipped"]]
    more = sum(bool(row["also"]) for row in found["results"])
    rows = [
        ["faults, named first", f"{found['named']} of {found['faults']}"],
        ["faults with further findings behind the first", str(more)],
        ["configs of `shapes/` on which it is silent", f"{found['silent']} of {found['configs']}"],
        ["processor seconds for a config", f"{min(seconds):.0f} to {max(seconds):.0f}"],
    ]
    tables = [markdown_table([["measured", "result"], *rows], left=1)]
    # the findings on shipped configs, if there are any
    spoken = [row for row in found["shipped"] if row["findings"]]
    if spoken:
        head = ["config", "findings"]
        cells = [[f"`{row['config']}`", ", ".join(row["findings"])] for row in spoken]
        tables.append(markdown_table([head, *cells], left=2))
    return _filled(text, "measured", "\n\n".join(tables))


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the page."""
    return [(PAGE, findings), (PAGE, measured)]
