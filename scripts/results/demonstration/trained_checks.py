"""Look at trained runs where the demonstration does not: harder prompts, and prompts out of
distribution.

    python scripts/results/demonstration/trained_checks.py runs/shapes-awm-seed0 [RUN ...]

The base model and the runs, one per training seed and opened at their best checkpoint, are judged
on the same prompts from the same noise, without guidance and with that which the demonstration
found best on validation prompts. Gains are taken per prompt, then averaged over tasks; the outcome
of each image is kept, from which all of it can be worked out again.
Measurements are kept in `--work`; the same command goes on where it stopped. Writes
assets/results/trained-checks.json.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from demonstration_measure import Bench, Setting, crossed_shares, rates

from flowrl.cli.options import quiet_libraries
from flowrl.core.errors import ConfigError
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.summary import packed
from flowrl.runs.folder import ENVIRONMENT, read_object
from flowrl.runs.open_run import chosen_checkpoint, saved_config

BASE, SEED = "assets/shapes-sd3", 260_023
LISTS = {"hard": "assets/shapes/hard-test.jsonl", "out of distribution": "assets/shapes/ood.jsonl"}
OF_BASE = {"base": (1.0, 10), "base_best_guidance": (5.0, 40)}
OF_RUNS = {"rl": (1.0, 10), "rl_best_guidance": (2.5, 40)}
GAINS = (("rl", "base"), ("rl", "base_best_guidance"), ("rl_best_guidance", "base_best_guidance"))
Found = Mapping[str, Sequence[Mapping[str, Any]]]  # measurements of each setting, one per seed


def main() -> None:
    """Measure, write, print."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    made.add_argument("--per-task", type=int, default=32, help="images, at least")
    made.add_argument("--work", type=Path, default=Path("runs/trained-checks"))
    made.add_argument("--out", type=Path, default=Path("assets/results/trained-checks.json"))
    args = made.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    # the checkpoints that the runs themselves call best
    places = [chosen_checkpoint(run) for run in args.runs]
    result: dict[str, Any] = {
        "kind": "flowrl checks of trained runs",
        "command": shlex.join(["python", *sys.argv]),
        **described(args.runs, places),
        "lists": {},
        "environment": environment(),
    }
    bench = Bench(args.work, "shapes/awm", [])
    # list by list: base and runs on the same prompts and noises
    for name, prompts in LISTS.items():
        result["lists"][name] = compared(measured(bench, name, prompts, places, args.per_task))
        said = [f"{key} {row['mean']:+.3f}" for key, row in result["lists"][name].items()]
        print(f"{name}: {', '.join(said)}", flush=True)
    write_json(args.out, result)


def described(runs: Sequence[Path], places: Sequence[Path]) -> dict[str, Any]:
    """Say which config the runs are of, and of each its seed, the checkpoint that is judged and
    where it was trained. Raises ConfigError for runs of several configs or of one seed."""
    configs = [saved_config(run) for run in runs]
    names = {one.name for one in configs}
    seeds = [one.seed for one in configs]
    if len(names) > 1 or len(set(seeds)) < len(seeds):
        pairs = zip(runs, configs, strict=True)
        said = ", ".join(f"{run} ({one.name}, seed {one.seed})" for run, one in pairs)
        raise ConfigError(f"expected runs of one config, each of another seed, got {said}")
    trained = []
    for run, place, config in zip(runs, places, configs, strict=True):
        at = {"iteration": int(place.name), "of": config.train.iterations}
        trained.append({"seed": config.seed, **at, "environment": read_object(run, ENVIRONMENT)})
    return {"config": names.pop(), "runs": trained}


def measured(bench: Bench, name: str, prompts: str, places: Sequence[Path], per_task: int) -> Found:
    """Judge the base model and the checkpoints on one list -> measurements of each setting."""
    word = name.replace(" ", "-")
    found: dict[str, list[Mapping[str, Any]]] = {}
    for key, (guidance, steps) in OF_BASE.items():
        setting = Setting(BASE, prompts, guidance, steps, per_task, SEED)
        found[key] = [bench.measure(f"{word}-{key}", setting)]
    for number, place in enumerate(places):
        for key, (guidance, steps) in OF_RUNS.items():
            setting = Setting(str(place), prompts, guidance, steps, per_task, SEED)
            found.setdefault(key, []).append(bench.measure(f"{word}-{key}-{number}", setting))
    return found


def compared(found: Found) -> dict[str, Any]:
    """Return the row of each setting, and the gains of the runs with intervals of their own."""
    rows = {}
    for key, some in found.items():
        setting = some[0]["setting"]
        about = {name: setting[name] for name in ("guidance", "steps", "best_of", "prompts")}
        images = sum(one["images"] for one in some)
        outcomes = [packed(one["outcomes"]) for one in some]
        rows[key] = {**crossed_shares(some), "images": images, **about, "outcomes": outcomes}
    for run, base in GAINS:
        gains = rates(found[run]) - rates(found[base])
        rows[f"{run}_minus_{base}"] = crossed(gains, found[base][0]["tags"])
    return rows


if __name__ == "__main__":
    main()
