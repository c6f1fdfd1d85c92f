"""Train runs of a comparison at the same time, each in a process: on several GPUs, or on one that a
small model leaves idle.

A run is the same as in one process, to the bit on a CPU: nothing of it depends on the others. So
budgets of seconds are refused, which the others would eat into.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, RunError
from flowrl.runs.compare.budgets import RESULT, Budgets
from flowrl.runs.compare.one_run import spend
from flowrl.runs.stop import Interrupted, StopSignal

GLANCE = 0.2  # seconds between looks for Ctrl-C
DEVICES = "CUDA_VISIBLE_DEVICES"
GO_ON = "the same command goes on"


class Asked(NamedTuple):
    """One run: what a process needs to train it."""

    config: str
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]
    budgets: Budgets
    folder: Path


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


def train_side_by_side(
    runs: Sequence[Asked], processes: int, stop: StopSignal, *, quiet: bool = False
) -> None:
    """Train the runs that are not finished, so many at a time; each GPU gets every so-manyth
    process.

    A run that fails does not end the others; its error is raised when they have ended. Raises
    Interrupted after Ctrl-C, which reaches every run, and RunError if a process dies.
    """
    todo = [one for one in runs if not (one.folder / RESULT).exists()]
    if not todo:
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    options: dict[str, Any] = {"mp_context": context, "initializer": _begin}
    options["initargs"] = (context.Value("i", 0), visible_devices())
    with ProcessPoolExecutor(min(processes, len(todo)), **options) as pool:
        waiting = {pool.submit(_train, one): one for one in todo}
        try:
            errors = _until_done(waiting, pool, stop, quiet=quiet)
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.kill()
            raise
    if stop.asked:
        raise Interrupted(f"stopped; {GO_ON}")
    if errors:
        raise errors[0]


def _until_done(
    waiting: dict[Future[None], Asked], pool: ProcessPoolExecutor, stop: StopSignal, *, quiet: bool
) -> list[BaseException]:
    """Wait for the runs, and hand a wish to stop on to them -> the errors of those that failed."""
    errors, told, ended, began = list[BaseException](), False, 0, time.monotonic()
    left = set(waiting)
    while left:
        done, left = wait(left, timeout=GLANCE, return_when=FIRST_COMPLETED)
        if stop.asked and not told:
            told = True
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                _interrupt(child.pid)
        for future in done:
            if future.cancelled():
                continue
            ended += 1
            error = future.exception()
            if error is not None:
                errors.append(_named(error, waiting[future]))
            if not quiet:
                minutes = (time.monotonic() - began) / 60 * len(left) / ended
                what = "ended" if error is None else f"{type(error).__name__}"
                print(
                    f"{waiting[future].folder}: {what}; {ended} of {len(waiting)}, about "
                    f"{minutes:.1f} min left",
                    file=sys.stderr,
                )
    return errors


def _named(error: BaseException, run: Asked) -> BaseException:
    """Return the error, as one of a run where the system ended its process."""
    if isinstance(error, BrokenProcessPool):
        return RunError(
            f"{run.folder}: its process, or one beside it, was ended by the system, as happens "
            f"where memory ends; {GO_ON}, with fewer --processes"
        )
    return error


def visible_devices() -> list[str]:
    """Return the names of the GPUs that a process may choose from, as CUDA_VISIBLE_DEVICES has
    them; [] without any."""
    count = torch.cuda.device_count()
    named = [name for name in os.environ.get(DEVICES, "").split(",") if name.strip()]
    return named[:count] or [str(number) for number in range(count)]


def _begin(started: Any, devices: Sequence[str]) -> None:
    """Prepare a process: a GPU of its own where there are several, and an end to its runs when the
    main process asks for it or is gone."""
    with started.get_lock():
        number = started.value
        started.value += 1
    if devices:
        os.environ[DEVICES] = devices[number % len(devices)]
    with contextlib.suppress(OSError):
        os.setsid()  # Ctrl-C reaches the main process, which hands it on once
    signal.signal(signal.SIGINT, _late)
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True)
        watch.start()


def _end_with(sentinel: int) -> None:
    """Stop the run of this process when another has ended, with a checkpoint."""
    wait_for([sentinel])
    _interrupt(os.getpid())


def _interrupt(process: int | None) -> None:
    if process is not None:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGINT)


_asked_to_stop = threading.Event()  # of this process, also between two runs


def _late(*_: object) -> None:
    _asked_to_stop.set()


def _train(one: Asked) -> None:
    """Train a run in this process; its result is in its folder."""
    with StopSignal() as stop:
        if _asked_to_stop.is_set():
            raise Interrupted(f"stopped before the run; {GO_ON}")
        config = load_config(one.config, list(one.overrides), one.plugins)
        spend(config, one.folder, one.budgets, stop=stop, quiet=True)
