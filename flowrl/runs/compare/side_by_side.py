"""Train runs of a comparison at the same time: on several GPUs, or on one that a small model leaves
idle.

Each run has a process of its own, so that one that fails or is ended takes no other along. A run is
the same as in one process, to the bit on a CPU: nothing of it depends on the others. So budgets of
seconds are refused, which the others would eat into.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from flowrl.config.load import load_config
from flowrl.core.devices import free_memory
from flowrl.core.errors import ConfigError, FlowRLError, RunError
from flowrl.runs.compare.budgets import RESULT, Budgets, check_same_run
from flowrl.runs.compare.run_process import DEVICES, Asked, RunProcess
from flowrl.runs.locks import lock
from flowrl.runs.stop import Interrupted, StopSignal

GLANCE = 0.2  # seconds between looks for Ctrl-C
GO_ON = "the same command goes on"
Ended = Callable[[Asked], object]  # is told of a run that is finished
_OTHER_DEVICE = re.compile(r"cuda:[1-9]\d*")


def check_processes(processes: int, budgets: Budgets) -> None:
    """Raise ConfigError for a number that is none, or for budgets that several processes would
    change."""
    if processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {processes}")
    if processes > 1 and (budgets.seconds or budgets.counted != "calls"):
        needed = "--seconds 0 --count calls" if budgets.seconds else "--count calls"
        raise ConfigError(
            f"--processes {processes}: runs beside each other slow each other down, so neither "
            f"seconds nor measured costs can be a budget: give {needed}"
        )


def train_all(
    runs: Sequence[Asked], processes: int, stop: StopSignal, keep: Ended, *, quiet: bool = False
) -> None:
    """Train runs, several at a time or one after the other, and `keep` each once, as soon as it is
    finished; `keep` itself trains one that is not. Raises Interrupted after Ctrl-C, else as
    `train_side_by_side` does."""
    kept = set[Path]()

    def keep_first(run: Asked) -> None:
        keep(run)
        kept.add(run.folder)

    if processes > 1:
        train_side_by_side(runs, processes, stop, keep_first, quiet=quiet)
    for run in [run for run in runs if run.folder not in kept]:
        if stop.asked:
            raise Interrupted(f"stopped between two runs; {GO_ON}")
        keep(run)


def train_side_by_side(
    runs: Sequence[Asked],
    processes: int,
    stop: StopSignal,
    ended: Ended,
    *,
    quiet: bool = False,
) -> None:
    """Train the runs that are not finished, so many at a time; the k-th of them works on GPU k
    modulo their number. `ended` is told of each, as soon as it is finished.

    A run that fails does not end the others; what failed is raised when they have ended. Raises
    ConfigError for a folder that holds another run, and where a config names one of several GPUs;
    Interrupted after Ctrl-C, which all runs hear of.
    """
    gpus = visible_devices()
    _check(runs, gpus)
    todo = [run for run in runs if not (run.folder / RESULT).exists()]
    if not todo:
        return
    # what this process has on a GPU is in the way of the others
    free_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    work = _Work(todo, min(processes, len(todo)), gpus, ended, quiet)
    try:
        work.through(stop)
    except Exception:  # a fault of ours: the others keep what they have
        work.end_all()
        raise
    finally:  # a second Ctrl-C
        work.kill()
    texts = [f"{run.folder}: {error}" for run, error in work.failed]
    if stop.asked:
        raise Interrupted("\n".join([f"stopped; {GO_ON}", *texts]))
    if texts:
        raise type(work.failed[0][1])("\n".join(texts))


def _check(runs: Sequence[Asked], gpus: Sequence[str]) -> None:
    """Refuse before anything is trained what would fail after hours."""
    for run in runs:
        config = load_config(run.config, list(run.overrides), run.plugins)
        check_same_run(run.folder, config, run.budgets)
        if (run.folder / RESULT).exists():
            continue
        if run.folder.exists():
            lock(run.folder, mend="wait for it").release()
        named = [value for value in _leaves(config.to_dict()) if _OTHER_DEVICE.fullmatch(value)]
        if len(gpus) > 1 and named:
            raise ConfigError(
                f"--processes: each process sees one of the {len(gpus)} GPUs, as cuda:0, but "
                f"{config.name} names {named[0]}: leave the device out, or give --processes 1"
            )


def _leaves(value: Any) -> Iterator[str]:
    """Yield all texts of nested dicts and lists."""
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, dict) else value
    for part in parts if isinstance(value, dict | list | tuple) else ():
        yield from _leaves(part)


def visible_devices() -> list[str]:
    """Return the names of the GPUs that a process may choose from, as CUDA_VISIBLE_DEVICES has
    them; [] without any."""
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(DEVICES, "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


class _Work:
    """The runs that wait, that train, and that failed."""

    def __init__(
        self, todo: Sequence[Asked], most: int, gpus: Sequence[str], ended: Ended, quiet: bool
    ) -> None:
        self.waiting, self.most, self.gpus, self.ended = list(todo), most, gpus, ended
        self.count, self.say = len(todo), _nothing if quiet else _say
        self.running = list[RunProcess]()
        self.failed = list[tuple[Asked, FlowRLError]]()
        self.took, self.told = list[float](), False
        where = "metrics.jsonl in a run's folder says how far it is"
        self.say(f"{len(todo)} runs, {most} at a time; {where}")

    def through(self, stop: StopSignal) -> None:
        """Begin and end all of them."""
        while self.waiting or self.running:
            self.begin(stop)
            self.look()

    def begin(self, stop: StopSignal) -> None:
        """Begin runs where there is room; or hand a wish to stop on, once."""
        while self.waiting and len(self.running) < self.most and not stop.asked:
            taken = {one.slot for one in self.running}
            slot = next(k for k in range(self.most) if k not in taken)
            gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
            run = self.waiting.pop(0)
            try:
                self.running.append(RunProcess(run, gpu, slot))
            except OSError as error:
                self.failed.append((run, RunError(f"its process cannot be started: {error}")))
        if stop.asked and not self.told:
            self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Let nothing begin any more, and all that runs end after its iteration."""
        self.told = True
        self.waiting.clear()
        for one in self.running:
            one.stop()

    def end_all(self) -> None:
        """Ask all to stop, and wait until they have."""
        self.ask_to_stop()
        while self.running:
            time.sleep(GLANCE)
            self.running = [one for one in self.running if not one.over()]

    def look(self) -> None:
        """Wait a moment for runs to end, and take note of those that have."""
        signs: list[Any] = [one.process.sentinel for one in self.running]
        signs += [one.line for one in self.running if not one.line.closed]
        wait(signs, timeout=GLANCE)
        for one in [one for one in self.running if one.over()]:
            self.running.remove(one)
            error = one.result()
            if error is None:
                self.took.append(time.monotonic() - one.began)
                error = self._finish(one.run)
            if error is not None and not isinstance(error, Interrupted):
                self.failed.append((one.run, error))
            self.say(f"{one.run.folder}: {error or 'finished'}{self._left()}")

    def _finish(self, run: Asked) -> FlowRLError | None:
        """Tell of a finished run -> what is wrong with it, which ends no other."""
        try:
            self.ended(run)
        except FlowRLError as error:
            return error
        return None

    def kill(self) -> None:
        """End what still runs, at once."""
        for one in self.running:
            one.kill()

    def _left(self) -> str:
        """Say how many runs are left and for how long, by those that are finished."""
        if self.told or not self.took or not (self.waiting or self.running):
            return ""
        usual, now = mean(self.took), time.monotonic()
        going = sum(max(0.0, usual - (now - one.began)) for one in self.running)
        minutes = (usual * len(self.waiting) + going) / self.most / 60
        left = len(self.waiting) + len(self.running)
        return f"; {left} of {self.count} left, about {minutes:.1f} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _nothing(text: str) -> None:
    """Say nothing."""
