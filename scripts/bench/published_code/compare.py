"""Run published code beside ours on the same random numbers.

    python scripts/bench/published_code/compare.py --clones clones

Clones the repositories at fixed commits (a few minutes and some hundred megabytes at first), runs
single functions of them, and writes assets/results/published-code.json: the largest difference of
each quantity, and its size. `python scripts/results/tables.py` puts the sentences into the pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cases as _  # noqa: F401 - which enter themselves
import torch
from gaps import CASES
from sources import load

from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.tables import text_table

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "assets" / "results" / "published-code.json"


def main() -> None:
    """Run all cases, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clones", type=Path, default=Path("clones"), help="folder of the clones")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases, rows = {}, [["case", "ours", "quantity", "difference", "largest value"]]
    for name, case in CASES.items():
        source = case.source
        gaps = case.run(load(source, given.clones))
        cases[name] = {
            "ours": case.ours,
            "repository": source.repository,
            "commit": source.commit,
            "path": source.path,
            "functions": list(source.names),
            "about": (case.run.__doc__ or "").strip(),
            "gaps": {what: {"difference": d, "value": v} for what, (d, v) in gaps.items()},
        }
        for what, (difference, value) in gaps.items():
            rows.append([name, case.ours, what, f"{difference:.1e}", f"{value:.3g}"])
    print(text_table(rows, left=3))
    command = "python scripts/bench/published_code/compare.py"
    about = {"kind": "flowrl beside published code", "command": command}
    write_json(given.out, {**about, "cases": cases, "environment": environment()})


if __name__ == "__main__":
    main()
