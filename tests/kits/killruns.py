"""Kill runs at random moments with SIGKILL, go on with them, and compare with runs that nobody
disturbed.

    python tests/kits/killruns.py --out runs/kills.json

Each run trains the axes of a shipped config on the toy field of the tests, in a fork of this
process, or in two that share their work. It is killed, each time at a random call of a function
within a phase, or by the clock, and goes on as `--resume auto` does. After each kill every
checkpoint in the folder is read. The last time it is left alone; then every file that does not hold
a time must be that of the undisturbed run, byte for byte. Phases take turns, so that short ones are
hit as well.

The command fails if a checkpoint could not be read, or a run ended in another way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

from killkit import NAMES, Outcome, Target, contents, run, warm_up  # noqa: E402
from toykit import axes, toy  # noqa: E402

from flowrl.config.load import Config  # noqa: E402
from flowrl.core.errors import CheckpointError  # noqa: E402
from flowrl.core.files import delete, write_json  # noqa: E402
from flowrl.training import checkpoint  # noqa: E402

NAME, SEED = "awm", 0  # of configs/shapes
KILLS = {2: 1, 1: 2}  # of runs of so many processes
# a checkpoint after each iteration, of which the newest two are kept: many are written and deleted
OFTEN = ("checkpoint={every: 1, keep: 2}", "eval.every=2", "samples.every=2", "train.parts=2")
REWARDS = (
    "rewards={red: {fn: toykit.warmth}, strict: {fn: toykit.reddish, weight: 0}}",
    "optimizer.lr=0.01",
)


class Trial(NamedTuple):
    """A config, how many processes train it, and its undisturbed run."""

    config: Config
    processes: int
    files: dict[str, str]
    calls: dict[str, list[int]]  # phase -> the function calls in each of its times


def undisturbed(processes: int, home: Path) -> Trial:
    """Make the run that others are compared with."""
    config = toy(home / NAME, *OFTEN, *REWARDS, *axes(f"shapes/{NAME}"))
    folder = home / f"{NAME}-{processes}"
    end = run(config, folder, processes=processes)
    if any(end.codes):
        said = Path(f"{folder}.log").read_text()
        sys.exit(f"{NAME}: the undisturbed run ended with {end.codes}\n{said}")
    calls: dict[str, list[int]] = {phase: [] for phase in NAMES}
    for (phase, _), (_, count) in pairwise(end.events):
        calls[phase].append(count)
    return Trial(config, processes, contents(folder), calls)


def unlike(one: dict[str, str], two: dict[str, str]) -> list[str]:
    """Name the files that are not the same in both."""
    return sorted(file for file in one | two if one.get(file) != two.get(file))


def moments(trial: Trial, rng: random.Random, phases: Iterator[str]) -> Iterator[Target]:
    """Yield moments to kill at: the phases in turn, at a random one of its times; of a run that
    goes on, and so may have few left, at the first. One in four is by the clock."""
    first = True
    for phase in phases:
        calls = trial.calls[phase]
        if calls:
            ranks = rng.choice([(0,), (1,), (0, 1)]) if trial.processes > 1 else (0,)
            number = rng.randrange(len(calls)) if first else 0
            first = False
            if rng.random() < 0.25:
                yield Target(phase, number, seconds=rng.uniform(0, 0.01), victims=ranks)
            else:
                yield Target(phase, number, rng.randint(1, max(calls[number], 1)), victims=ranks)


def broken(folder: Path) -> list[str]:
    """Read every checkpoint of a run -> what is wrong with those that cannot be."""
    found = []
    for each in checkpoint.checkpoint_folders(folder):
        try:
            checkpoint.load(each)
        except CheckpointError as error:
            found.append(str(error))
    return found


def tried(trial: Trial, folder: Path, targets: Iterator[Target], kills: int) -> dict[str, Any]:
    """Kill one run at up to `kills` moments, let it end, and compare."""
    killed: list[str] = []
    left: list[str] = []  # how processes ended whose other one was killed
    wrong: list[str] = []
    over = False
    for _, target in zip(range(kills), targets, strict=False):
        end: Outcome = run(trial.config, folder, target, trial.processes)
        if end.phase is None:
            over = True
            break
        killed.append(end.phase)
        others = [code for rank, code in enumerate(end.codes) if rank not in target.victims]
        left += ["had to be killed" if end.waited else f"ended with {code}" for code in others]
        wrong += broken(folder)
    # the rest undisturbed, if it has not come to its end
    if not over:
        end = run(trial.config, folder, processes=trial.processes)
    if any(end.codes):
        wrong.append(f"ended with {end.codes}: {Path(f'{folder}.log').read_text()[-2000:]}")
    differ = unlike(trial.files, contents(folder))
    return {"killed": killed, "others": left, "wrong": wrong, "differ": differ}


def measure(home: Path) -> Iterator[dict[str, Any]]:
    """Kill as often as KILLS says, and yield a row for each run."""
    rng = random.Random(SEED)
    for processes, wanted in KILLS.items():
        trial, done = undisturbed(processes, home), 0
        phases = cycle(rng.sample(NAMES, len(NAMES)))
        while done < wanted:
            folder = home / f"killed-{processes}-{done}"
            row = tried(trial, folder, moments(trial, rng, phases), wanted - done)
            delete(folder)
            done += len(row["killed"])
            yield {"processes": processes, **row}


def main() -> None:
    """Kill, resume, compare, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # a fork says what it has to say in a file of its own
    warnings.simplefilter("ignore")
    warm_up()
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for row in measure(Path(home)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    kills = Counter[int]()
    for row in rows:
        kills[row["processes"]] += len(row["killed"])
    found = {
        "by_processes": dict(kills),
        "checkpoints_unreadable": sum(bool(row["wrong"]) for row in rows),
        "runs_that_differ": sum(bool(row["differ"]) for row in rows),
        "rows": rows,
    }
    write_json(args.out, found)
    if any(row["wrong"] or row["differ"] for row in rows):
        sys.exit(f"a run came out wrong: see {args.out}")


if __name__ == "__main__":
    main()
