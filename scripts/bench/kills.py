"""Kill runs of several families, under a launcher, and with rewards
that fork, with SIGKILL at random moments; go on with each, and compare with runs that nobody
disturbed.

    python scripts/bench/kills.py                     # all 60 kills, those that are missing
    python scripts/bench/kills.py --most 3            # three of these

Each run trains the axes of a shipped config on the toy field of the tests, in a fork of this
process. It is killed once, at a moment that is drawn from the undisturbed run of its family, which
is made once: evenly over the time from its first phase, when all is loaded, to its end. The moment
is kept as the phase, and the seconds since it began, so that a machine with less time hits the same
work. The run goes on by the same command; then every file that does not hold a time must be that of
the undisturbed run, byte for byte. Under a launcher two processes train: either all of it is
killed, as when a machine dies, or one of the two processes. A reward that forks leaves a child
behind that outlives its run.

Writes assets/results/kills.json after each kill: a row for each, with the moment and what differs.
Kills that are in the file already are not made again. The command fails if a run came out wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

from killkit import BETWEEN, Target, contents, run, warm_up  # noqa: E402
from killruns import OFTEN, broken, unlike  # noqa: E402
from processkit import free_port  # noqa: E402
from toykit import axes, toy, write_toy  # noqa: E402

from flowrl.config.load import Config  # noqa: E402
from flowrl.core.files import write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402
from flowrl.runs.folder import CONFIG, SUMMARY  # noqa: E402

OUT = ROOT / "assets" / "results" / "kills.json"
LAUNCHER, FORKS = "launcher", "forking reward"
KILLS = {"spo": 9, "vgpo": 9, "gardo": 9, "tdm_r1": 9, "find": 9, LAUNCHER: 8, FORKS: 7}
"""Family -> how often its runs are killed: 60 times in all."""
STRICT = "strict: {fn: toykit.reddish, weight: 0}"
PLAIN = f"rewards={{red: {{fn: toykit.warmth}}, {STRICT}}}"
RATE = "optimizer.lr=0.01"
OWN = {
    # a preference that judges estimates, and one that doubts and one that looks for what is new
    "spo": (f"rewards={{red: {{fn: toykit.redness}}, {STRICT}}}", RATE),
    "gardo": (
        f"rewards={{red: {{fn: toykit.warmth}}, {STRICT}, "
        "novelty: {fn: toykit.blueness, weight: 0}}",
        RATE,
    ),
    FORKS: (f"rewards={{red: {{fn: toykit.forking, seconds: 3}}, {STRICT}}}",),
}
SMALL = {  # what the toy's four iterations and rewards of little spread need
    "spo": ("credit.least=0.01",),
    "tdm_r1": ("surrogate.alone=1",),
    "find": ("likelihood.reads=text",),
}
PATIENCE = 180.0  # seconds for a run under a launcher
TRIES = 20  # moments that are drawn until one comes before the run's end
POLL = 0.01  # seconds between two looks at a folder
Moments = list[tuple[str, float]]  # phases, and when each began; the last is the end


class Kill(NamedTuple):
    """What one kill came to."""

    phase: str | None  # what was killed, or in which phase; None: the run had ended before
    wrong: list[str]  # checkpoints that cannot be read, and ends that are none
    folder: Path


def overrides_of(family: str) -> list[str]:
    """Return what makes the toy's config one of a family."""
    if family == LAUNCHER:
        return [*OFTEN, PLAIN]
    if family == FORKS:
        return [*OFTEN, *OWN[FORKS]]
    own = [*OWN.get(family, (PLAIN, RATE)), *axes(f"shapes/{family}")]
    return [*OFTEN, *own, *SMALL.get(family, ())]


def moment(moments: Moments, rng: random.Random) -> tuple[float, Target]:
    """Draw when to kill a run -> the seconds since its first phase began, and where that is."""
    first = next(place for place, (phase, _) in enumerate(moments) if phase != BETWEEN)
    when = rng.uniform(moments[first][1], moments[-1][1])
    before = [phase for phase, begun in moments[:-1] if begun <= when]
    phase, begun = moments[len(before) - 1]
    target = Target(phase, before.count(phase) - 1, seconds=when - begun)
    return when - moments[first][1], target


def killed_fork(config: Config, folder: Path, target: Target) -> Kill:
    """Kill a run in a fork of this process at a moment, and let it go on."""
    end = run(config, folder, target, counted=False)
    wrong = broken(folder) if end.phase else []
    if end.phase is not None:
        end = run(config, folder, counted=False)._replace(phase=end.phase)
    if any(end.codes):
        wrong.append(f"ended with {end.codes}: {Path(f'{folder}.log').read_text()[-2000:]}")
    return Kill(end.phase, wrong, folder)


def killed_launcher(home: Path, folder: Path, seconds: float, rng: random.Random) -> Kill:
    """Kill a run under torchrun so many seconds after all was loaded, all of it or one process, and
    go on."""
    begun, log = launch(home, folder), Path(f"{folder}.log")
    wait_for(begun, folder / CONFIG)
    time.sleep(seconds)
    workers = children(begun.pid)
    whom = rng.choice(["all", "process 0", "process 1"])
    over = begun.poll() is not None or len(workers) < 2
    if not over:
        doomed = [begun.pid, *workers] if whom == "all" else [workers[int(whom[-1])]]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
    begun.wait(PATIENCE)
    if over:
        return Kill(None, [], folder)
    wrong = broken(folder)
    again = launch(home, folder)
    if again.wait(PATIENCE):
        wrong.append(f"ended with {again.returncode}: {log.read_text()[-2000:]}")
    return Kill(whom, wrong, folder)


def launch(home: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Begin the toy's run in `folder` by torchrun with two processes, or go on with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    command += ["-m", "--", "flowrl", "train", str(home / "toy.yaml"), *overrides_of(LAUNCHER)]
    command += ["--run", str(folder), "--resume", "auto", "--plugin", "toykit", "--quiet"]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'kits'}"
    about = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with Path(f"{folder}.log").open("a") as log:
        return subprocess.Popen(command, env=about, cwd=home, stdout=log, stderr=log)


def wait_for(begun: subprocess.Popen[bytes], file: Path) -> float:
    """Wait until a run has written a file, or has ended -> the time."""
    until = time.monotonic() + PATIENCE
    while not file.exists() and begun.poll() is None and time.monotonic() < until:
        time.sleep(POLL)
    return time.monotonic()


def children(pid: int) -> list[int]:
    """Return the processes that a process started, the oldest first."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


class Family(NamedTuple):
    """A family, and its undisturbed run."""

    name: str
    home: Path
    config: Config
    moments: Moments
    files: dict[str, str]


def undisturbed(name: str, home: Path) -> Family:
    """Make the run that others are compared with."""
    folder = home / "undisturbed"
    write_toy(home)
    config = toy(home, *overrides_of(name))
    if name == LAUNCHER:  # it says of no phase when it begins: it works from its config to its end
        begun = launch(home, folder)
        moments = [(LAUNCHER, wait_for(begun, folder / file)) for file in (CONFIG, SUMMARY)]
        code = begun.wait(PATIENCE)
    else:
        end = run(config, folder, counted=False)
        phases = [*(phase for phase, _ in end.events), BETWEEN]
        moments, code = [*zip(phases, end.times, strict=True)], end.codes[0]
    if code:
        sys.exit(f"{name}: the undisturbed run failed\n{Path(f'{folder}.log').read_text()}")
    return Family(name, home, config, moments, contents(folder))


def killed(family: Family, number: int, seed: int) -> dict[str, Any]:
    """Kill a run of a family, go on, and compare -> its row."""
    rng = random.Random(f"{seed} {family.name} {number}")
    for attempt in range(TRIES):
        seconds, target = moment(family.moments, rng)
        folder = family.home / f"{number}-{attempt}"
        if family.name == LAUNCHER:
            found = killed_launcher(family.home, folder, seconds, rng)
        else:
            found = killed_fork(family.config, folder, target)
        if found.phase is not None:
            break
    else:
        sys.exit(f"{family.name}: no moment came before the run's end")
    differ = unlike(family.files, contents(folder))
    about = {"family": family.name, "number": number, "seconds": round(seconds, 3)}
    return {**about, "killed": found.phase, "wrong": found.wrong, "differ": differ}


def main() -> None:
    """Kill, go on, compare, and write what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most", type=int, default=sum(KILLS.values()), help="kills of this call")
    parser.add_argument("--only", nargs="*", default=list(KILLS), choices=KILLS, metavar="FAMILY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    # what is there, of this seed
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows = found.get("rows", []) if found.get("seed", args.seed) == args.seed else []
    known = {(row["family"], row["number"]) for row in rows}
    # the families in turn, so that a few kills are of several
    every = [(name, number) for name in args.only for number in range(KILLS[name])]
    every.sort(key=lambda kill: kill[1])
    todo = [kill for kill in every if kill not in known][: args.most]
    warnings.simplefilter("ignore")
    warm_up()
    families: dict[str, Family] = {}
    home = Path(tempfile.mkdtemp())
    try:
        for name, number in todo:
            if name not in families:
                families[name] = undisturbed(name, home / name.replace(" ", "-"))
            rows.append(killed(families[name], number, args.seed))
            print(json.dumps(rows[-1]), flush=True)
            write_json(args.out, summed(rows, args.seed))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if any(row["wrong"] or row["differ"] for row in rows):
        sys.exit(f"a run came out wrong: see {args.out}")


def summed(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Count the kills of each family, and the runs that came out wrong."""
    kills = Counter(row["family"] for row in rows)
    return {
        "kills": len(rows),
        "by_family": {name: kills[name] for name in KILLS},
        "checkpoints_unreadable": sum(bool(row["wrong"]) for row in rows),
        "runs_that_differ": sum(bool(row["differ"]) for row in rows),
        "seed": seed,
        "machine": environment(),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
