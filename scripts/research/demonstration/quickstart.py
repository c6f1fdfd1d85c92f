"""Write down what a run of `bash scripts/quickstart.sh` took and reached.

    bash scripts/quickstart.sh --run runs/quick       # in a fresh clone
    python scripts/research/demonstration/quickstart.py runs/quick
    python scripts/research/demonstration/quickstart.py runs/quick \\
        --out assets/results/quickstart-float32.json    # on a processor without bfloat16

Seconds are those of the run's own log; the score is that of the test prompts, judged as
demonstration.py does, at the checkpoint that a run is opened at. Writes
assets/results/quickstart.json.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from demonstration_measure import Bench, Setting, entry

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.runs.folder import ENVIRONMENT, EVALS, TIMING, read_object, read_rows
from flowrl.runs.open_run import score_of

BESIDE = ("eval", "save", "samples")  # phases that are not of an iteration


def without_rest(row: Mapping[str, float]) -> float:
    """Return an iteration's own seconds."""
    return row["total"] - sum(row.get(key, 0.0) for key in BESIDE)


def main() -> None:
    """Read the run, judge it, write the file."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("run", type=Path)
    made.add_argument("--work", type=Path, default=Path("runs/quickstart"))
    made.add_argument("--out", type=Path, default=Path("assets/results/quickstart.json"))
    args = made.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    # what it took
    rows = read_rows(args.run, TIMING)
    own = sorted(map(without_rest, rows))
    figures = {"fastest": own[0], "median": statistics.median(own), "slowest": own[-1]}
    # what it reached
    test = "assets/shapes/test.jsonl"
    setting = Setting(str(args.run), test, 1.0, 10, 144, 260_027, reward="graded_angle")
    found = entry([Bench(args.work, "shapes/awm", []).measure(args.run.name, setting)])
    result: dict[str, Any] = {
        "kind": "flowrl quickstart",
        "command": shlex.join(["python", *sys.argv]),
        "minutes": round(sum(row["total"] for row in rows) / 60, 2),
        "iteration_seconds": {name: round(value, 2) for name, value in figures.items()},
        "validation": [[row["iteration"], score_of(row)] for row in read_rows(args.run, EVALS)],
        "test": {key: found[key] for key in ("mean", "interval", "images", "tasks")},
        "environment": read_object(args.run, ENVIRONMENT),
    }
    write_json(args.out, result)
    print(f"{result['minutes']} minutes, {result['test']['mean']:.3f} of the test prompts")


if __name__ == "__main__":
    main()
