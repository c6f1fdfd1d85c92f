"""Run the quickstart with several seeds, and write down what it took and gained.

    python scripts/results/quickstart.py                 # seeds 0 to 4, into quickstart.json
    python scripts/results/quickstart.py --out runs/float32.json \\
        --seeds 0 --set model.dtype=float32              # as on a processor without bfloat16

Each run is the command of `scripts/quickstart.sh` with another seed; one that is there already is
only read. Gains are on the validation prompts, from before training to the last evaluation, their
interval over seeds and prompts. Minutes are those of the run's own log: give it a quiet machine.
`scripts/results/tables.py` then writes the sentence of the README.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, percent, points, wrapped

from flowrl.core.files import write_json
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.folder import ENVIRONMENT, EVALS, SUMMARY, TIMING, read_object, read_rows
from flowrl.runs.gain import score_of

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "assets" / "results" / "quickstart.json"
BESIDE = ("eval", "save", "samples")  # phases that are not of an iteration


def command(changes: Sequence[str]) -> list[str]:
    """Return the command that `scripts/quickstart.sh` runs, with changes."""
    lines = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8").splitlines()
    (found,) = [line for line in lines if line.startswith('"$VIRTUAL_ENV/bin/flowrl" train')]
    words = shlex.split(found)[1:-1]  # without the program, and without "$@"
    return [sys.executable, "-m", "flowrl", *words, *changes]


def own_seconds(row: Mapping[str, float]) -> float:
    """Return an iteration's own seconds."""
    return row["total"] - sum(row.get(key, 0.0) for key in BESIDE)


def ends(folder: Path) -> list[dict[str, list[float]]]:
    """Read a run's first and last evaluation -> by task, the share right of each prompt."""
    rows = read_rows(folder, EVALS)
    return [rows[0]["by_prompt"], rows[-1]["by_prompt"]]


def one(folder: Path) -> dict[str, Any]:
    """Read what a run took and reached."""
    rows = read_rows(folder, TIMING)
    own = sorted(map(own_seconds, rows))
    figures = {"fastest": own[0], "median": statistics.median(own), "slowest": own[-1]}
    return {
        "minutes": round(sum(row["total"] for row in rows) / 60, 2),
        "iteration_seconds": {name: round(value, 2) for name, value in figures.items()},
        "validation": [[row["iteration"], score_of(row)] for row in read_rows(folder, EVALS)],
        "shares": ends(folder),
        "environment": read_object(folder, ENVIRONMENT),
    }


def gain(runs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Work out the gain over all runs with its interval, over seeds and prompts."""
    tags, differences = list[str](), []
    for run in runs:
        before, after = run["shares"]
        tags = [task for task, some in before.items() for _ in some]
        pairs = zip(before.values(), after.values(), strict=True)
        differences.append(np.concatenate([np.subtract(b, a) for a, b in pairs]))
    found = crossed(np.array(differences), tags)
    return {"mean": found["mean"], "interval": found["interval"]}


def sentence(text: str) -> str:
    """Write into the README how long the quickstart takes, and what it gains."""
    found = json.loads(OUT.read_text(encoding="utf-8"))
    minutes = [run["minutes"] for run in found["runs"].values()]
    least, most = math.floor(min(minutes)), math.ceil(max(minutes))
    mean, span = found["gain"]["mean"], found["gain"]["interval"]
    low, high = (points(end, "") for end in span)
    share = statistics.mean(run["validation"][-1][1] for run in found["runs"].values())
    shown = json.loads((OUT.parent / "demonstration.json").read_text(encoding="utf-8"))
    guided = shown["curves"]["base_best_guidance"]
    said = (
        f"Both need a CPU only, and no network once set up. Training took {least} to {most} "
        "minutes on two cores with bfloat16 instructions, and takes longer without; over "
        f"{len(minutes)} seeds it brought {points(mean, '')} points more right images of "
        f"validation prompts ({low} to {high}), to {percent(share)}. Untrained, with its best "
        f"guidance and steps, the model has {percent(guided)}, at eight times the evaluations."
    )
    return between(text, "quickstart", "quickstart: end", [wrapped(said)])


def targets() -> list[tuple[Path, Any]]:
    """Return the page that has a sentence of this file."""
    return [(ROOT / "README.md", sentence)]


def main() -> None:
    """Run what is missing, read all, write the file."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    made.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes")
    made.add_argument("--work", type=Path, default=Path("runs/quickstart"))
    made.add_argument("--out", type=Path, default=OUT)
    args = made.parse_args()
    folders = []
    for seed in args.seeds:
        folder = args.work / f"{args.out.stem}-{seed}"
        folders.append(folder)
        if not (folder / SUMMARY).exists():
            own = [f"seed={seed}", *args.changes, "--run", str(folder)]
            subprocess.run(command(own), check=True, cwd=ROOT)
    runs = {str(seed): one(folder) for seed, folder in zip(args.seeds, folders, strict=True)}
    result: dict[str, Any] = {
        "kind": "flowrl quickstart",
        "command": shlex.join(["python", *sys.argv]),
        "gain": gain(runs.values()),
        "runs": runs,
    }
    write_json(args.out, result)
    print(f"{result['gain']['mean']:+.3f} on the validation prompts")


if __name__ == "__main__":
    main()
