"""Train runs of a comparison at the same time: on several GPUs, or on one that a small model leaves
idle.

Each run has a process of its own, so that one that fails or is ended takes no other along. A run is
the same as in one process, to the bit on a CPU: nothing of it depends on the others. So budgets of
seconds are refused, which the others would eat into.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import diffusers
import torch
import transformers

from flowrl.config.load import Config, load_config
from flowrl.core.devices import free_memory
from flowrl.core.errors import ConfigError, FlowRLError, RewardError, RunError
from flowrl.runs.compare.budgets import Budgets, check_same_run
from flowrl.runs.compare.one_run import Judged, spend
from flowrl.runs.folder import RESULT, lock
from flowrl.runs.stop import SIGNALS, Interrupted, Stop, StopSignal
from flowrl.training.run import OverlapWarning

DEVICES = "CUDA_VISIBLE_DEVICES"
if torch.version.hip:
    DEVICES = "HIP_VISIBLE_DEVICES"
KINDS: dict[str, type[FlowRLError]] = {
    "ConfigError": ConfigError,
    "RewardError": RewardError,
    "Interrupted": Interrupted,
}
START = "if __name__ == '__main__':"
TRAINS = "trains"  # the kind of word that a process tells first
PATIENCE = 30.0  # seconds for a process to end when its run has
LONGEST = 20_000  # letters of what is told

GLANCE = 0.2  # seconds between looks for Ctrl-C
GO_ON = "the same command goes on"
_OTHER_DEVICE = re.compile(r"cuda:[1-9]\d*")


class Asked(NamedTuple):
    """One run: what a process needs to train it."""

    config: str | Config  # a name, or one that a program handed over
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]
    budgets: Budgets
    folder: Path
    label: str = ""  # what the config is called
    track: tuple[str, ...] = ()  # trackers that are told the run
    judged: Judged | None = None  # is told each evaluation, as `spend` has it; pickled

    def load(self) -> Config:
        """Load its config."""
        return load_config(self.config, list(self.overrides), self.plugins)

    def spend(self, stop: Stop, *, quiet: bool) -> dict[str, Any]:
        """Train it in this process, see `spend`."""
        more: dict[str, Any] = {"quiet": quiet, "judged": self.judged, "track": self.track}
        return spend(self.load(), self.folder, self.budgets, stop=stop, **more)


class Told(NamedTuple):
    """What a process tells: the kind of error and its words, "" for a run that is finished."""

    kind: str
    text: str


class Wish:
    """Tell a run that it is to stop: the main process has asked for it, or is gone."""

    def __init__(self, line: Connection) -> None:
        self._heard = threading.Event()
        threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    @property
    def asked(self) -> bool:
        """Tell whether the run is to stop after this iteration."""
        return self._heard.is_set()

    def _listen(self, line: Connection) -> None:
        with contextlib.suppress(OSError):
            line.poll(None)  # until there is a word, or the other end is closed
        self._heard.set()


class RunProcess:
    """A process that trains one run; `gpu` is the only one that it sees, None: all of them.

    Raises OSError where the system starts none.
    """

    def __init__(self, run: Asked, gpu: str | None, slot: int) -> None:
        self.run, self.slot, self.began = run, slot, time.monotonic()
        self.told: Told | None = None
        self.trains, self.told_at = False, 0.0
        context = get_context("spawn")  # CUDA does not survive a fork
        resource_tracker.ensure_running()  # which lets signals through while it starts
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_train, args=(run, gpu, theirs), daemon=False)
        try:
            with _no_signals():  # it hears of them by the line alone, also while it imports
                self.process.start()
        except BaseException:  # a second Ctrl-C, or a system that starts no process
            if self.process.pid is not None:
                self.process.kill()
            self.line.close()
            raise
        finally:
            theirs.close()

    def stop(self) -> None:
        """Ask it to stop after this iteration, with a checkpoint."""
        with contextlib.suppress(OSError):
            self.line.send("stop")

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self.process.kill()
        self.process.join(PATIENCE)

    def over(self) -> bool:
        """Read what it has told, and say whether it has ended. One that has told its end and stays,
        held by a thread of a reward, is ended."""
        while not self.line.closed and self.line.poll():
            try:
                word: Told = self.line.recv()
            except (EOFError, OSError):
                self.line.close()
                break
            if word.kind == TRAINS:
                self.trains = True
            else:
                self.told, self.told_at = word, time.monotonic()
        if self.told and time.monotonic() - self.told_at > PATIENCE:
            self.process.kill()
        return self.process.exitcode is not None

    def result(self) -> FlowRLError | None:
        """Return why the run of an ended process is not finished; None if it is."""
        self.line.close()
        if self.told is None:
            return RunError(_lost(self.process.exitcode or 0, trains=self.trains))
        kind, text = self.told
        if not kind:
            return None
        return KINDS.get(kind, RunError)(text)


def _lost(code: int, *, trains: bool) -> str:
    """Say what may have ended a process that did not tell."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL":
            name += ", as the system does where memory is short: give fewer --processes"
        return f"its process was ended by {name}"
    if trains:
        return f"its process ended with exit code {code} in the middle: what it printed says why"
    return (
        f"its process ended with exit code {code} before it could train: what it printed says "
        f"why; a script that compares in several processes begins its own work below {START!r}"
    )


@contextlib.contextmanager
def _no_signals() -> Iterator[None]:
    """Hold signals back; a process that is started inside never gets them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _train(run: Asked, gpu: str | None, line: Connection) -> None:
    """Train a run in this process, and tell the main one how it ended."""
    # programs that a reward starts can be ended by signals: those are blocked no more, but do
    # nothing to this process
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _ignored)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    wish = Wish(line)
    if gpu is not None:
        os.environ[DEVICES] = gpu  # before anything asks for a device
    told = Told("", "")
    try:
        line.send(Told(TRAINS, ""))
        # the main process has loaded the same config and said what there is to say of it
        for library in (diffusers, transformers):
            library.utils.logging.disable_progress_bar()
        warnings.simplefilter("ignore", OverlapWarning)
        run.spend(wish, quiet=True)
    except FlowRLError as error:
        known = [name for name, kind in KINDS.items() if isinstance(error, kind)]
        told = Told([*known, RunError.__name__][0], str(error)[:LONGEST])
    except BaseException as error:  # anything else is a fault: it is shown whole, and told
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:LONGEST]
        told = Told(RunError.__name__, f"{text}; its traceback is above")
    with contextlib.suppress(OSError):  # nobody listens any more
        line.send(told)


def _ignored(*_: object) -> None:
    """Stand in for what a signal does."""


Ended = Callable[[Asked], object]  # is told of a run that is finished


def check_processes(processes: int, budgets: Budgets) -> None:
    """Raise ConfigError for a number that is none, or for budgets that several processes would
    change."""
    if processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {processes}")
    if processes > 1 and budgets.seconds:
        raise ConfigError(
            f"--processes {processes}: runs beside each other slow each other down, so seconds "
            "can be no budget: give --seconds 0"
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
    for run in runs:
        if run.folder not in kept:
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
        config = run.load()
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
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
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
        self.count, self.quiet = len(todo), quiet
        self.running = list[RunProcess]()
        self.failed = list[tuple[Asked, FlowRLError]]()
        self.took, self.told = list[float](), False
        where = "metrics.jsonl in a run's folder says how far it is"
        self.say(f"{len(todo)} runs, {most} at a time; {where}")

    def say(self, text: str) -> None:
        """Tell how it goes, unless it is to be quiet."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

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
