"""Compare two run folders bit by bit: every metric of every iteration, every tensor of the last
checkpoint.

    python scripts/bench/same_run.py runs/before runs/after --renamed cost=nfe

Exits with 1 if anything differs; `--renamed` says which metrics of the first run have another name
in the second.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from flowrl.runs.folder import read_metrics
from flowrl.training.checkpoint import latest


def metric_differences(one: Path, two: Path, renamed: dict[str, str]) -> list[str]:
    """Name each metric that differs, or is in one run only, as "iteration: metric"."""
    first, second = list(read_metrics(one)), list(read_metrics(two))
    found = [] if len(first) == len(second) else [f"{len(first)} and {len(second)} iterations"]
    for old, new in zip(first, second, strict=False):
        known = {renamed.get(name, name): value for name, value in old.items()}
        names = sorted(known.keys() | new.keys())
        found += [
            f"{new['iteration']}: {name}" for name in names if known.get(name) != new.get(name)
        ]
    return found


def weight_differences(one: Path, two: Path) -> list[str]:
    """Name each tensor of the last checkpoints that differs, as "file: tensor"."""
    folders = [latest(one), latest(two)]
    if folders[0] is None or folders[1] is None:
        sys.exit(f"expected a checkpoint in {one} and in {two}")
    found = []
    for file in sorted(folders[0].glob("*.safetensors")):
        first, second = load_file(file), load_file(folders[1] / file.name)
        if first.keys() != second.keys():
            found.append(f"{file.name}: other tensors")
        shared = sorted(first.keys() & second.keys())
        found += [f"{file.name}: {n}" for n in shared if not torch.equal(first[n], second[n])]
    return found


def main() -> None:
    """Print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", type=Path)
    parser.add_argument("two", type=Path)
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW")
    args = parser.parse_args()
    renamed = dict(pair.split("=") for pair in args.renamed)
    found = metric_differences(args.one, args.two, renamed)
    found += weight_differences(args.one, args.two)
    print("\n".join(found) if found else "equal to the bit: all metrics, all tensors")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
