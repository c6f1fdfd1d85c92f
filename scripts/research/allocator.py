"""What it costs on a CPU that freed memory goes back to the system: iterations of shapes configs
with and without `flowrl.core.allocator.keep_freed_memory`, in turn.

    python scripts/research/allocator.py    # writes assets/results/allocator.json

Each round is a process of its own, with a thread for each core; the machine has to be idle. Seconds
are those of the wall; what the system spends, on new pages above all, is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import flowrl
from flowrl.core.environment import environment
from flowrl.core.files import write_json

CONFIGS = ("shapes/awm", "shapes/flow_grpo")
SETTINGS = {"kept": {}, "given back": {"GLIBC_TUNABLES": ""}}
"""An allocator's setting in the environment, even an empty one, leaves the allocator as it is."""


def main() -> None:
    """Time every config both ways, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("assets/results/allocator.json"))
    parser.add_argument("--one", metavar="CONFIG", help="time one config here, print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_iteration(args.one)))
        return
    found = {config: both_ways(config, args.rounds) for config in CONFIGS}
    command = "python scripts/research/allocator.py"
    write_json(args.out, {"command": command, "configs": found, "environment": environment()})


def both_ways(config: str, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds by setting, and the share of seconds that is left."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name, more in SETTINGS.items():
            command = [sys.executable, __file__, "--one", config]
            run = subprocess.run(
                command, env=os.environ | more, capture_output=True, text=True, check=True
            )
            rows[name].append(json.loads(run.stdout.splitlines()[-1]))
            print(config, name, rows[name][-1], flush=True)
    found: dict[str, Any] = {name: middle(measured) for name, measured in rows.items()}
    found["ratio"] = found["kept"]["seconds"] / found["given back"]["seconds"]
    return found


def middle(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number."""
    columns = zip(*(row.values() for row in rows), strict=True)
    return dict(zip(rows[0], map(median, columns), strict=True))


def one_iteration(config: str) -> dict[str, float]:
    """Return the seconds of the second iteration, and the peak of memory in MiB."""
    trainer = flowrl.Trainer(flowrl.load_config(config))
    trainer.step()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    trainer.step()
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return {"seconds": seconds, "of_the_system": system, "peak_mib": after.ru_maxrss / 1024}


if __name__ == "__main__":
    main()
