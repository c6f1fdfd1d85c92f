"""Runs on disks that fail, with checkpoints that are not what they were, under a clock that jumps.

    python tests/kits/diskruns.py --out runs/disks.json

A run of the tests' toy is trained undisturbed. Then again, each time with one fault:

- its n-th file cannot be written, nor any later one: the disk is full, was remounted for reading,
  or fails;
- its newest checkpoint is torn or altered, or swapped with the one before, or is
  another run's;
- the clock jumps by a day, back or forth, in the middle.

What may come out is the undisturbed run, byte for byte, or one message; and after a message the
run goes on, once the fault is gone, and ends as the undisturbed one. Traceback, a run that ends in
another way and one that takes a stranger's weights are faults: the command fails.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import io
import itertools
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kits")]

from killkit import contents, warm_up  # noqa: E402
from quickfigures import undrawn  # noqa: E402
from toykit import toy  # noqa: E402

from flowrl.config.load import Config  # noqa: E402
from flowrl.core.errors import FlowRLError  # noqa: E402
from flowrl.core.files import write_json  # noqa: E402
from flowrl.core.installation import environment  # noqa: E402
from flowrl.runs.train import train  # noqa: E402
from flowrl.training import checkpoint  # noqa: E402

REASONS = (errno.ENOSPC, errno.EROFS, errno.EIO)
EVERY = 100  # of the files that a run writes
OFTEN = ("checkpoint={every: 1, keep: 3}", "eval.every=2", "samples.every=2")
DAY = 86_400.0
STRANGE = ("swapped with the one before", "another model's")
"""Whole checkpoints where they do not belong: a message may be the end."""


class Disk:
    """Count the files that are opened for writing below a folder; from number `first` on, fail."""

    def __init__(self, folder: Path, first: int = 0, reason: int = 0) -> None:
        self.folder, self.first, self.reason, self.writes = folder.resolve(), first, reason, 0

    def write(self, path: Any) -> None:
        """Count one file. Raises the disk's error from the chosen one on."""
        if isinstance(path, int):
            return
        if not Path(os.fsdecode(path)).resolve().is_relative_to(self.folder):
            return
        self.writes += 1
        if self.first and self.writes >= self.first:
            raise OSError(self.reason, os.strerror(self.reason), str(path))

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Let all files be opened through this disk."""
        # Python's files go through `open`, tensors through safetensors, which opens its own
        opened, saved = builtins.open, vars(checkpoint)["save_file"]

        def watched(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            if set(mode) & set("wax+"):
                self.write(file)
            return opened(file, mode, *args, **named)

        def save(tensors: Any, file: Any, *args: Any, **named: Any) -> None:
            self.write(file)
            saved(tensors, file, *args, **named)

        with (
            patch.object(builtins, "open", watched),
            patch.object(io, "open", watched),
            patch.dict(vars(checkpoint), {"save_file": save}),
        ):
            yield


def ended(config: Config, run: Path) -> str | None:
    """Begin a run or go on with it -> the message that ended it, None at its end."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(config, run, resume="auto", quiet=True)
    except FlowRLError as error:
        return str(error)
    return None


def full(config: Config, wanted: dict[str, str], home: Path) -> Iterator[dict[str, Any]]:
    """Let the disk fail at every `EVERY`-th file that the run writes."""
    disk = Disk(home / "counted")
    with disk.mounted():
        ended(config, home / "counted")
    for number, reason in zip(range(1, disk.writes + 1, EVERY), itertools.cycle(REASONS)):
        run = home / f"disk{number}"
        failing = Disk(run, number, reason)
        row = attempt(config, run, wanted, failing.mounted)
        yield {"fault": errno.errorcode[reason], "where": f"file {number} of {disk.writes}", **row}


def damaged(config: Config, wanted: dict[str, str], home: Path) -> Iterator[dict[str, Any]]:
    """Damage the newest checkpoint of a run that was stopped after three iterations: in turn
    another way for each of its files."""
    # a run that has an iteration left, and another one whose checkpoint is whole but strange
    whole, other = home / "whole", home / "other"
    stopped(config, whole)
    stopped(toy(home, *OFTEN, "seed=9", "model={fn: toykit.linear, channels: 4}"), other)
    newest = checkpoint.checkpoint_folders(whole)[-1]
    names = sorted(file.name for file in newest.iterdir())
    # every file of the newest checkpoint, then whole ones where they do not belong
    kinds: dict[str, Callable[[Path], None]]
    kinds = {"torn": cut, "altered": flip, "lost": Path.unlink}
    ways: dict[str, Callable[[Path], None]] = {}
    for place, (name, kind) in enumerate(itertools.product(names, kinds)):
        if place % 4 == 0:  # of three ways, which is another one for the next file
            ways[f"{kind} {name}"] = partial(done_to, kinds[kind], name)
    ways[STRANGE[0]] = swap
    ways[STRANGE[1]] = lambda at: exchange(at, checkpoint.checkpoint_folders(other)[-1])
    # each time a fresh copy is damaged and gone on with
    for name, way in ways.items():
        run = home / "damaged"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        way(checkpoint.checkpoint_folders(run)[-1])
        message = ended(config, run)
        # right: it ends as the undisturbed run; a strange checkpoint may also be refused
        alike = message is None and contents(run) == wanted
        right = alike or (message is not None and name in STRANGE)
        yield {"fault": name, "where": "newest checkpoint", "message": message, "right": right}


def jumps(config: Config, wanted: dict[str, str], home: Path) -> Iterator[dict[str, Any]]:
    """Let the clock jump by a day at every tenth time that it is read."""
    for way, sign in (("back", -1), ("forth", 1)):
        real, reads = time.time, itertools.count()
        clock = partial(jumping, real, reads, sign * DAY)
        fault = partial(patch.object, time, "time", clock)
        row = attempt(config, home / f"clock-{way}", wanted, fault)
        yield {"fault": f"clock {way}", "where": "every tenth reading", **row}


def jumping(real: Callable[[], float], reads: Iterator[int], far: float) -> float:
    """Return the time, ten readings here and ten readings `far` away."""
    return real() + far * (next(reads) // 10 % 2)


def attempt(
    config: Config, run: Path, wanted: dict[str, str], fault: Callable[[], Any]
) -> dict[str, Any]:
    """Train under a fault, then without it -> the message, and whether the end is as it should."""
    with fault():
        message = ended(config, run)
    rest = ended(config, run) if message is not None else None
    return {"message": message, "right": rest is None and contents(run) == wanted}


def stopped(config: Config, run: Path) -> None:
    """Train to the end, and lose the last checkpoint: an iteration is left."""
    ended(config, run)
    shutil.rmtree(checkpoint.checkpoint_folders(run)[-1])


def done_to(what: Callable[[Path], None], name: str, folder: Path) -> None:
    """Do something to one file of a checkpoint."""
    what(folder / name)


def cut(file: Path) -> None:
    """Leave half of a file."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(newest: Path) -> None:
    """Exchange the files of a checkpoint and those of the one before it."""
    before = checkpoint.checkpoint_folders(newest.parent.parent)[-2]
    aside = newest.with_name("aside")
    newest.rename(aside)
    before.rename(newest)
    aside.rename(before)


def exchange(newest: Path, other: Path) -> None:
    """Put another run's checkpoint in a checkpoint's place."""
    shutil.rmtree(newest)
    shutil.copytree(other, newest)


def main() -> int:
    """Try all faults, print those that did harm -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warm_up()
    rows = []
    # curves are laid out and not drawn: they hold times, so nobody compares them
    with tempfile.TemporaryDirectory() as place, undrawn():
        home = Path(place)
        # what every disturbed run has to end as
        config = toy(home, *OFTEN)
        ended(config, home / "undisturbed")
        wanted = contents(home / "undisturbed")
        for row in itertools.chain(
            full(config, wanted, home),
            damaged(config, wanted, home),
            jumps(config, wanted, home),
        ):
            # paths of this machine say nothing to a reader
            said = row["message"]
            rows.append({**row, "message": said and said.replace(place, "")[:200]})
            print(row, flush=True)
    harm = [row for row in rows if not row["right"]]
    figures = {"faults": len(rows), "did_harm": len(harm), "rows": rows}
    write_json(args.out, {**figures, "environment": environment()})
    print(f"{len(rows)} faults, {len(harm)} did harm")
    return 1 if harm else 0


if __name__ == "__main__":
    sys.exit(main())
