"""One run of a comparison in a process of its own, and what the main process knows of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import diffusers
import torch
import transformers

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, FlowRLError, RewardError, RunError
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.one_run import spend
from flowrl.runs.stop import SIGNALS, Interrupted
from flowrl.training.run import OverlapWarning

DEVICES = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
KINDS: dict[str, type[FlowRLError]] = {
    kind.__name__: kind for kind in (ConfigError, RewardError, Interrupted)
}
START = "if __name__ == '__main__':"
TRAINS = "trains"  # the kind of word that a process tells first
PATIENCE = 30.0  # seconds for a process to end when its run has
LONGEST = 20_000  # letters of what is told


class Asked(NamedTuple):
    """One run: what a process needs to train it."""

    config: str
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]
    budgets: Budgets
    folder: Path


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
        return KINDS.get(kind, RunError)(text) if kind else None


def _lost(code: int, *, trains: bool) -> str:
    """Say what may have ended a process that did not tell."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        memory = ", as the system does where memory is short: give fewer --processes"
        return f"its process was ended by {name}{memory if name == 'SIGKILL' else ''}"
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
            signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    wish = Wish(line)
    if gpu is not None:
        os.environ[DEVICES] = gpu  # before anything asks for a device
    told = Told("", "")
    try:
        line.send(Told(TRAINS, ""))
        _spend(run, wish)
    except FlowRLError as error:
        known = [name for name, kind in KINDS.items() if isinstance(error, kind)]
        told = Told([*known, RunError.__name__][0], str(error)[:LONGEST])
    except BaseException as error:  # anything else is a fault: it is shown whole, and told
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:LONGEST]
        told = Told(RunError.__name__, f"{text}; its traceback is above")
    with contextlib.suppress(OSError):  # nobody listens any more
        line.send(told)


def _spend(run: Asked, wish: Wish) -> None:
    # the main process has loaded the same config and said what there is to say of it
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", OverlapWarning)
    config = load_config(run.config, list(run.overrides), run.plugins)
    if wish.asked:
        raise Interrupted("stopped before it began")
    spend(config, run.folder, run.budgets, stop=wish, quiet=True)


def _nothing(*_: object) -> None:
    """Stand in for what a signal does."""
