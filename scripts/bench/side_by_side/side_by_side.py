"""Measure the same work in a public trainer and in flowrl.

    git clone https://github.com/yifan123/flow_grpo ~/flow_grpo
    python scripts/bench/side_by_side/side_by_side.py flow_grpo ~/flow_grpo \\
        --python ~/flow_grpo/venv/bin/python --model stabilityai/stable-diffusion-3.5-medium \\
        --size 512 --batch 24 --group 24 --prompts 4 --guidance 4.5 --kl 0.01 --dtype bfloat16

The folder is yours, at whatever commit; its program is run unchanged, by the Python that has what
it needs. The work is one iteration of Flow-GRPO on SD3 with LoRA; the same model, prompts, group,
steps, guidance, KL, dtype and rows in a network call, the size of the JPEG file as reward, no
averaged weights. With `--own-batch` flowrl runs once more with network calls of its own size, and
with `--compile` again with `runtime.compile`; what compiling takes falls into the iteration that
does not count.
Trainers take turns, `--rounds` times; each turn is a process of its own, whose first iteration does
not count. `watch.py` says what the phases are and by which clock they are timed.

The command is the same on a CPU and on a GPU. Without `--model` it takes the SD3 of this
repository, with text encoders that read as many tokens as SD3's. Writes
assets/results/side-by-side-<trainer>.json: seconds by phase (the median over iterations and
rounds), calls and rows of the network, peak memory, and flowrl's share of each.
`python scripts/results/tables.py` makes the table of docs/memory.md from these files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from small_model import lengthened
from trainers import TRAINERS, WORK, Start, Work, flowrl
from watch import PHASES

from flowrl.core.errors import FlowRLError, RunError
from flowrl.core.files import write_json
from flowrl.core.installation import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NOUNS = ("red circle", "blue square", "green triangle", "yellow star")


def turn(start: Start, python: str, place: Path, options: list[str]) -> dict[str, Any]:
    """Run one program under the watch -> what it saw. Raises RunError if it ended by itself."""
    # what an earlier turn saw must not be taken for this one's
    out = place / "seen.json"
    out.unlink(missing_ok=True)
    watched = [python, str(HERE / "watch.py"), "--out", str(out), *options]
    log = place / "log.txt"
    # in its own process, with its own Python: trainers need other versions
    with log.open("w") as file:
        done = subprocess.run(
            [*watched, "--", *start.program],
            cwd=place,
            env=surroundings(start),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode or not out.exists():
        end = log.read_text(errors="replace")[-3000:]
        raise RunError(f"{start.program[:2]} ended with {done.returncode}:\n{end}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def surroundings(start: Start) -> dict[str, str]:
    """Return the environment of a program: this one, and the trainer's folder before its path."""
    paths = [start.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, **start.environment, "PYTHONPATH": path}


def write_prompts(place: Path, count: int) -> None:
    """Write `count` different prompts to train with, and one that nobody looks at."""
    names = [NOUNS[number % len(NOUNS)] for number in range(count)]
    lines = [f"a {name}, number {number}" for number, name in enumerate(names)]
    (place / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "test.txt").write_text("a circle\n", encoding="utf-8")


def measure(args: argparse.Namespace, work: Work) -> dict[str, list[dict[str, Any]]]:
    """Let the trainers take turns -> what the watch saw, by trainer."""
    seen: dict[str, list[dict[str, Any]]] = {}
    # the watch counts calls of the network, so it has to know its class
    options = ["--network", "diffusers:SD3Transformer2DModel", "--updates", "1", "--warm-up", "1"]
    options += ["--iterations", str(args.iterations)]
    # in turns: what else the machine does falls on all alike
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            write_prompts(place, work.prompts * (args.iterations + 2))
            own_model = work.model == WORK.model
            model = lengthened(ROOT / work.model, place / "model") if own_model else work.model
            here = replace(work, model=str(model))
            # their program, ours with their batches, and ours with our own
            starts = {
                args.trainer: (
                    TRAINERS[args.trainer](here, args.folder.resolve(), place),
                    args.python,
                ),
                "flowrl": (flowrl(here, place, args.trainer, 0), sys.executable),
            }
            if args.own_batch:
                own = flowrl(here, place, args.trainer, args.own_batch)
                starts["flowrl, own batches"] = (own, sys.executable)
            if args.own_batch and args.compile:
                program = [*own.program, "model.runtime.compile=true"]
                compiled = own._replace(program=program)
                starts["flowrl, own batches, compiled"] = (compiled, sys.executable)
            for who, (start, python) in starts.items():
                found = turn(start, python, place, options)
                seen.setdefault(who, []).append(found)
                all_seconds = [row["seconds"]["all"] for row in found["iterations"]]
                print(f"round {number + 1}, {who}: {all_seconds}", flush=True)
    return seen


def summed_up(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of one trainer over all iterations of all rounds."""
    rows = [row for found in rounds for row in found["iterations"]]
    phases = (*PHASES, "all")
    spent = [row["seconds"] for row in rows]
    seconds = {name: median(map(itemgetter(name), spent)) for name in phases}
    peaks = [found["peak_MiB"] for found in rounds if found["peak_MiB"]]
    return {
        "seconds": seconds,
        "wall": median(row["wall"] for row in rows),
        "all": [row["seconds"]["all"] for row in rows],
        "calls": rows[-1]["calls"],
        "rows": rows[-1]["rows"],
        "peak_MiB": median(peaks) if peaks else None,
        "versions": rounds[-1]["versions"],
    }


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return our figures over theirs: seconds of each phase, and memory."""
    pairs = {name: (ours["seconds"][name], theirs["seconds"][name]) for name in ours["seconds"]}
    pairs["peak memory"] = (ours["peak_MiB"] or 0.0, theirs["peak_MiB"] or 0.0)
    return {name: one / two for name, (one, two) in pairs.items() if two}


def commit(folder: Path) -> str | None:
    """Name the commit of a folder, if it has one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def main() -> int:
    """Measure, print and write -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", choices=sorted(TRAINERS))
    parser.add_argument("folder", type=Path, help="a clone of its repository")
    parser.add_argument("--python", default=sys.executable, help="which has what it needs")
    for name, value in asdict(WORK).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    parser.add_argument("--own-batch", type=int, default=0, help="of flowrl, once more")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="own batches once more, with compiled blocks",
    )
    parser.add_argument("--iterations", type=int, default=2, help="of a turn, after the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.compile and not args.own_batch:
        parser.error("--compile is of flowrl's own batches: expected --own-batch too")
    # the usual work, with what the command line changes
    said = {name: getattr(args, name) for name in asdict(WORK)}
    given = {name: value for name, value in said.items() if value is not None}
    work = replace(WORK, **given)
    try:
        seen = measure(args, work)
    except FlowRLError as error:
        print(f"side_by_side: {error}", file=sys.stderr)
        return 2
    # medians of each trainer over the rounds, and their ratios
    trainers = {name: summed_up(rounds) for name, rounds in seen.items()}
    theirs = trainers[args.trainer]
    result = {
        "trainer": args.trainer,
        "commit": commit(args.folder),
        "work": asdict(work),
        "rounds": args.rounds,
        "clock": "wall" if seen["flowrl"][0]["gpu"] else "processor",
        "trainers": trainers,
        "ratios": {name: ratios(t, theirs) for name, t in trainers.items() if name != args.trainer},
        "environment": environment(),
    }
    out = args.out or ROOT / "assets" / "results" / f"side-by-side-{args.trainer}.json"
    write_json(out, result)
    print(f"{out}: {result['ratios']} of the time and memory of {args.trainer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
