"""Kill runs at random moments with SIGKILL, go on with them, and compare with runs that nobody
disturbed.

    python tests/kits/killruns.py --out runs/kills.json        # 108 kills
    python tests/kits/killruns.py --kills 4 --only rwr --out FILE

Each run trains the axes of a shipped config on the toy field of the tests, in a fork of this
process, or in two that share their work. It is killed up to three times, each time at a random
call of a function within a phase, or by the clock, and goes on as `--resume auto` does. After each
kill every checkpoint in the folder is read. The last time it is left alone; then every file that
does not hold a time must be that of the undisturbed run, byte for byte. Phases take turns, so that
short ones are hit as well.

A row of the result counts the kills of a config by the phase in which they came. The command fails
if a checkpoint could not be read, or a run ended in another way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

from killkit import NAMES, Outcome, Target, contents, run, warm_up  # noqa: E402
from PIL import Image  # noqa: E402
from toykit import COLORS, axes, toy  # noqa: E402

from flowrl.config.load import Config  # noqa: E402
from flowrl.core.errors import CheckpointError  # noqa: E402
from flowrl.core.files import delete, write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402
from flowrl.training import checkpoint  # noqa: E402
from flowrl.training.checkpoint import checkpoint_folder  # noqa: E402
from flowrl.training.trainer import Trainer  # noqa: E402

MOST = 3  # kills of one run
# a checkpoint after each iteration, of which the newest two are kept: many are written and deleted
OFTEN = ("checkpoint={every: 1, keep: 2}", "eval.every=2", "samples.every=2", "train.parts=2")
REWARDS = (
    "rewards={red: {fn: toykit.warmth}, strict: {fn: toykit.reddish, weight: 0}}",
    "optimizer.lr=0.01",
)
FAMILIES = {
    "policy gradient": ("flow_grpo", "branch_grpo", "grpo_guard", "tp_grpo"),
    "forward process": ("diffusion_nft", "awm"),
    "regression": ("rwr", "best_of_n"),
    "preference": ("diffusion_dpo",),
    "reward gradient": ("draft",),
    "initial noise": ("find_own", "zo_rank_sgd"),
    "credit that remembers": ("ddpo",),
    "reward trained along": ("learned",),
    "models trained along": ("tdm_r1",),
    "teachers": ("flow_opd",),
    "stored pairs": ("diffusion_dpo_offline",),
    "scout": ("sol_rl",),
    "choice of prompts": ("difficulty_bandit", "prompt_replay", "knapsack"),
}
"""Family -> its configs of configs/shapes, or the toy's own method with what `OWN` says."""
FOUR = ("train.prompts=4",)
OWN: dict[str, tuple[str, ...]] = {
    "learned": ("rewards={red: {fn: toykit.apprentice}, strict: {fn: toykit.reddish, weight: 0}}",),
    # samplers remember what each prompt's images were worth
    **{
        name: (*REWARDS, "train.prompts=4", f"sampler={{fn: {name}}}")
        for name in FAMILIES["choice of prompts"]
    },
}


def config_of(name: str, folder: Path) -> Config:
    """Return the toy config with the axes of a shipped one, and write what it reads."""
    if name in OWN:
        return toy(folder, *OFTEN, *OWN[name])
    own = list(axes(f"shapes/{name}"))
    if name == "flow_opd":
        own += [*FOUR, f"loss.teachers={json.dumps(teachers(folder))}"]
    if name == "diffusion_dpo_offline":
        own += [*FOUR]
    if name == "sol_rl":
        own += ["scout={images: 12, steps: 2}", "train.group=4"]
    config = toy(folder, *OFTEN, *REWARDS, *own)
    if name == "diffusion_dpo_offline":
        write_pairs(folder)
    return config


def teachers(folder: Path) -> dict[str, str]:
    """Save two runs whose weights differ, one for each of the toy's tags -> their folders."""
    found = {}
    for seed, tag in enumerate(("even", "odd"), 11):
        run = folder / f"teacher-{tag}"
        other = toy(folder, f"model.seed={seed}", "train.ema=0", "eval.weights=current")
        Trainer(other).save(checkpoint_folder(run, 0))
        found[tag] = str(run)
    return found


def write_pairs(folder: Path) -> None:
    """Write images of two colours, and in place of the toy's prompts a list in which the red one
    is preferred, first or second in turn."""
    names = {"red.png": (200, 40, 90), "green.png": (40, 200, 90)}
    for file, colour in names.items():
        Image.new("RGB", (16, 16), colour).save(folder / file)
    lines = []
    for number, word in enumerate(COLORS):
        first, second = list(names)[:: 1 if number % 2 else -1]
        label = {"image_0": first, "image_1": second, "label_0": number % 2}
        lines.append(json.dumps({"prompt": f"a {word} dot", **label}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))


class Trial(NamedTuple):
    """A config, how many processes train it, and its undisturbed run."""

    name: str
    config: Config
    processes: int
    files: dict[str, str]
    calls: dict[str, list[int]]  # phase -> the function calls in each of its times


def undisturbed(name: str, processes: int, home: Path) -> Trial:
    """Make the run that others are compared with."""
    config, folder = config_of(name, home / name), home / f"{name}-{processes}"
    end = run(config, folder, processes=processes)
    if any(end.codes):
        said = Path(f"{folder}.log").read_text()
        sys.exit(f"{name}: the undisturbed run ended with {end.codes}\n{said}")
    calls: dict[str, list[int]] = {phase: [] for phase in NAMES}
    for (phase, _), (_, count) in pairwise(end.events):
        calls[phase].append(count)
    return Trial(name, config, processes, contents(folder), calls)


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


def measure(args: argparse.Namespace, home: Path) -> Iterator[dict[str, Any]]:
    """Kill as often as was asked for, one config after the other, and yield a row for each trial.

    Of each family one config is trained by two processes.
    """
    rng = random.Random(args.seed)
    # all configs with one process; of each family the first also with two
    asked = set(args.only)
    chosen = {f: list(filter(asked.__contains__, configs)) for f, configs in FAMILIES.items()}
    every = [(f, n) for f, configs in chosen.items() for n in configs]
    first = [(f, configs[0]) for f, configs in chosen.items() if configs]
    for processes, wanted in ((2, args.pairs), (1, args.kills - args.pairs)):
        names = first if processes == 2 else every
        trials: dict[str, Trial] = {}
        # each config has its own order of phases, so that all phases are hit
        turns = {name: cycle(rng.sample(NAMES, len(NAMES))) for _, name in names}
        done = 0
        for number, (family, name) in enumerate(cycle(names)):
            if done >= wanted:
                break
            # an undisturbed run to compare with, once a config
            if name not in trials:
                trials[name] = undisturbed(name, processes, home)
            targets = moments(trials[name], rng, turns[name])
            folder = home / f"{name}-{processes}-{number}"
            row = tried(trials[name], folder, targets, min(MOST, wanted - done))
            delete(folder)
            done += len(row["killed"])
            yield {"family": family, "config": name, "processes": processes, **row}


def counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the trials of each config and number of processes."""
    found = []
    # one row for each config and number of processes
    keys = dict.fromkeys((row["family"], row["config"], row["processes"]) for row in rows)
    for family, config, processes in keys:
        mine = [row for row in rows if (row["config"], row["processes"]) == (config, processes)]
        # in which phase the kills fell, and how other processes ended
        killed = Counter(phase for row in mine for phase in row["killed"])
        others = Counter(end for row in mine for end in row["others"])
        found.append(
            {
                "family": family,
                "config": config,
                "processes": processes,
                "runs": len(mine),
                "kills": killed.total(),
                "by_phase": {phase: killed[phase] for phase in NAMES if killed[phase]},
                "other_process": dict(others),
                "wrong": [text for row in mine for text in row["wrong"]],
                "differ": [file for row in mine for file in row["differ"]],
            }
        )
    return found


def main() -> None:
    """Kill, resume, compare, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for configs in FAMILIES.values() for name in configs]
    parser.add_argument("--kills", type=int, default=108)
    parser.add_argument("--pairs", type=int, default=24, help="kills of runs of two processes")
    parser.add_argument("--only", nargs="*", default=every, choices=every, metavar="CONFIG")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # a fork says what it has to say in a file of its own
    warnings.simplefilter("ignore")
    warm_up()
    began, about, rows = time.monotonic(), environment(), []
    with tempfile.TemporaryDirectory() as home:
        for row in measure(args, Path(home)):
            rows.append(row)
            print(json.dumps(row), flush=True)
            # after every trial, so that a run of this script that was cut off is not lost
            seconds = round(time.monotonic() - began, 1)
            found = {**summed(rows), "seconds": seconds, "seed": args.seed, "machine": about}
            write_json(args.out, found)
    if any(row["wrong"] or row["differ"] for row in rows):
        sys.exit(f"a run came out wrong: see {args.out}")


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up all trials."""
    configs = counted(rows)
    phases = Counter(phase for row in rows for phase in row["killed"])
    return {
        "kills": phases.total(),
        "runs": len(rows),
        "by_phase": {phase: phases[phase] for phase in NAMES},
        "by_processes": {n: kills_of(configs, n) for n in (1, 2)},
        "checkpoints_unreadable": sum(bool(row["wrong"]) for row in rows),
        "runs_that_differ": sum(bool(row["differ"]) for row in rows),
        "configs": configs,
    }


def kills_of(configs: list[dict[str, Any]], processes: int) -> int:
    """Add up the kills of runs with so many processes."""
    return sum(row["kills"] for row in configs if row["processes"] == processes)


if __name__ == "__main__":
    main()
