"""Measure every class of docs/pipelines.md, and write its table:
``python scripts/results/pipelines.py [CLASS ...]``.

Each class is asked on a tiny network of random weights (`flowrl.models.tiny`); one that is
served trains three iterations of AWM on it, and the plain pipeline with the exported weights is put
beside the run's model. The results are in assets/results/pipelines.json. With ``--page`` nothing is
measured, and with ``--missing`` only what has no whole result yet.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/pipelines.md"
START, END = "<!-- pipelines: table -->\n", "<!-- pipelines: end -->\n"


def page(table: str) -> str:
    """Return the page with another table between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n{table}\n{END}{rest.partition(END)[2]}"


def write(rows: dict[str, Any]) -> None:
    """Write the results, and the page's table where all classes have one."""
    from pipelinetable import FILE, classes, table

    from flowrl.core.installation import environment

    known = [name for names in classes().values() for name in names]
    rows = {name: rows[name] for name in sorted({*known}) if name in rows}
    machine = {key: value for key, value in environment().items() if key != "commit"}
    found = {"classes": rows, "environment": machine}  # each row has its own commit
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if rows.keys() >= {*known}:
        PAGE.write_text(page(table(rows)), encoding="utf-8")


def main(asked: list[str]) -> int:
    """Measure the classes that are asked about, or all -> how many failed."""
    from pipelinetable import FILE, classes, measured, record, whole

    from flowrl.core.installation import environment

    rows = record() if FILE.exists() else {}
    commit = environment()["commit"]  # before the file of the results changes
    names = [name for name in asked if not name.startswith("--")]
    if not names and "--page" not in asked:
        names = sorted({name for group in classes().values() for name in group})
        if "--missing" in asked:
            names = [name for name in names if not whole(rows.get(name))]
    failed = 0
    for name in names:
        try:
            rows[name] = measured(name)
        except Exception:  # what is left is measured, too
            traceback.print_exc()
            failed += 1
            continue
        if "run" in rows[name]:
            rows[name]["commit"] = commit
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        write(rows)
    write(rows)
    return failed


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/kits")]
    sys.exit(main(sys.argv[1:]))
