"""Show that the monitor of reward hacking speaks in time, and that going back helps.

    python scripts/research/hacking.py --runs runs/hacking --seeds 3

Each seed trains `shapes/awm` on a reward that pays for colour alone (`hackable.py`,
`hacking.yaml`), once unguarded, with the monitor at `warn`, and once with `rollback`. The result
file says per seed after how many iterations the monitor spoke, when the held-out score had fallen
by five points, and where both runs ended. A run that is there already is gone on with.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.load import Config, load_config
from flowrl.core.environment import environment
from flowrl.core.files import write_json
from flowrl.core.tables import text_table
from flowrl.runs.folder import EVALS, FINDINGS, Rows, read_rows
from flowrl.runs.open_run import score_of
from flowrl.runs.train import train

SETTINGS = Path(__file__).with_suffix(".yaml")
FALL = 0.05  # of the held-out score


def main() -> None:
    """Train what is missing, write the result file, print a table."""
    args = parser().parse_args()
    # both arms from the same seed: one only warns, the other goes back
    seeds = []
    for seed in range(args.seeds):
        for arm in ("unguarded", "rollback"):
            config = config_of(arm, seed, args.iterations, args.set)
            train(config, args.runs / f"{arm}-seed{seed}", resume="auto", quiet=args.quiet)
        folders = [args.runs / f"{arm}-seed{seed}" for arm in ("unguarded", "rollback")]
        seeds.append({"seed": seed, **compared(*folders)})
    # what was changed goes into the file, so that the command can be had again
    result = {
        "config": "shapes/awm with scripts/research/hacking.yaml",
        "iterations": args.iterations,
        "changes": args.set,
        "seeds": seeds,
        "summary": summary_of(seeds),
        "environment": environment(),
    }
    write_json(args.out, result)
    print(table_of(seeds))
    print(f"written: {args.out}")


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--runs", type=Path, default=Path("runs/hacking"))
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--iterations", type=int, default=24)
    made.add_argument("--out", type=Path, default=Path("assets/results/hacking.json"))
    made.add_argument("--set", nargs="*", default=[], help="overrides of the config")
    made.add_argument("--quiet", action="store_true")
    return made


def config_of(arm: str, seed: int, iterations: int, changes: list[str]) -> Config:
    """Return the config of an arm."""
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    overrides = [*settings["common"], *settings["arms"][arm], f"seed={seed}"]
    overrides += [f"train.iterations={iterations}", *changes]
    return load_config("shapes/awm", overrides, ("hackable",))


def compared(unguarded: Path, guarded: Path) -> dict[str, Any]:
    """Compare two runs of a seed from their folders."""
    rows = read_rows(unguarded, EVALS)
    found = read_rows(guarded, FINDINGS)
    hacked = [row["iteration"] for row in read_rows(unguarded, FINDINGS) if of_hacking(row)]
    alarm, fallen = hacked[0] if hacked else None, fallen_at(rows)
    return {
        "alarm": alarm,
        "fallen": fallen,
        "in_time": alarm is not None and (fallen is None or alarm < fallen),
        "rollbacks": sum(row["action"] == "rollback" for row in found),
        "unguarded": curve(rows),
        "rollback": curve(read_rows(guarded, EVALS)),
    }


def of_hacking(row: dict[str, Any]) -> bool:
    """Say whether a finding is of the monitor of hacking."""
    return bool(row["monitor"] == "hacking")


def fallen_at(rows: Rows) -> int | None:
    """Return the first evaluation `FALL` or more below the best before; None where there is
    none."""
    best = -1.0
    for row in rows:
        score = score_of(row)
        if score is None:
            continue
        if best - score >= FALL:
            return int(row["iteration"])
        best = max(best, score)
    return None


def curve(rows: Rows) -> list[list[float]]:
    """Return [iteration, held-out score] of each evaluation."""
    return [[row["iteration"], score_of(row) or 0.0] for row in rows]


def summary_of(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return in how many seeds the monitor was in time and rollback ended higher, and the mean
    ends."""
    ends: dict[str, list[float]] = {"unguarded": [], "rollback": []}
    for seed in seeds:
        for arm, some in ends.items():
            some.append(seed[arm][-1][1])
    pairs = zip(ends["rollback"], ends["unguarded"], strict=True)
    return {
        "seeds": len(seeds),
        "in_time": sum(seed["in_time"] for seed in seeds),
        "higher": sum(one > other for one, other in pairs),
        "start": statistics.mean(seed["unguarded"][0][1] for seed in seeds),
        "end": {arm: statistics.mean(values) for arm, values in ends.items()},
    }


def table_of(seeds: list[dict[str, Any]]) -> str:
    """Set the seeds under each other."""
    rows = [["seed", "alarm after", "fell 5 points after", "start", "unguarded", "rollback"]]
    for seed in seeds:
        scores = [seed["unguarded"][0], seed["unguarded"][-1], seed["rollback"][-1]]
        texts = [f"{score:.3f}" for _, score in scores]
        told = [str(seed[key]) if seed[key] is not None else "-" for key in ("alarm", "fallen")]
        rows.append([str(seed["seed"]), *told, *texts])
    return text_table(rows)


if __name__ == "__main__":
    main()
