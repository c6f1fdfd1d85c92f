"""Runs of the toy in forks of this process, one or two processes each, that are killed in a chosen
phase.

This process must never have differentiated anything: torch does not let a fork do it then.
"""

from __future__ import annotations

import atexit
import hashlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.load import Config
from flowrl.core.errors import FlowRLError
from flowrl.core.processes import end_process
from flowrl.runs import train as runs
from flowrl.runs.log import RunLogger, Silence

BETWEEN = "between phases"
PHASES = {
    "rollout": "sampling",
    "decode": "sampling",
    "reward": "scoring",
    "train": "update",
    "save": "checkpoint write",
    "eval": "evaluation",
    "samples": "image grid",
}
"""What a run's log calls a phase -> what it is called here."""
NAMES = (BETWEEN, *dict.fromkeys(PHASES.values()))
EVENT = struct.Struct("<Bd")  # the phase that begins, and when
# what depends on the clock, or on the number of a process
UNLIKE = {"timing.jsonl", "summary.json", "report.html", "curves.png", "environment.json", ".lock"}
PATIENCE = 120.0  # seconds for a run that takes one or two
GRACE = 20.0  # seconds for the process whose other one was killed; then it is killed, too


class Target(NamedTuple):
    """Kill so many seconds after `phase` began for the `occurrence`-th time, 0 = the first; after
    the start of the run where `phase` is BETWEEN."""

    phase: str
    occurrence: int
    delay: float
    victims: tuple[int, ...] = (0,)


class Outcome(NamedTuple):
    """How a run in forks ended."""

    phase: str | None  # in which it was killed; None: it had ended before
    codes: list[int]  # of all processes, negative for a signal
    events: list[tuple[str, float]]  # (phase, when it began) of the first victim
    waited: bool  # whether a process that was left alone did not end by itself


class Fork(NamedTuple):
    """One process of a run, and how it says in which phase it is."""

    pid: int
    pipe: int
    now: mmap.mmap

    @property
    def phase(self) -> str:
        """Return the phase that it is in, or was in when it died."""
        return NAMES[self.now[0]]

    def events(self, until: float) -> Iterator[tuple[str, float]]:
        """Yield each phase that begins, and when, until the process or the time is over."""
        while select.select([self.pipe], [], [], max(until - time.monotonic(), 0.0))[0]:
            data = os.read(self.pipe, EVENT.size)
            if len(data) < EVENT.size:
                return
            number, when = EVENT.unpack(data)
            yield NAMES[number], when


def run(config: Config, folder: Path, target: Target | None = None, processes: int = 1) -> Outcome:
    """Begin the run in `folder`, or go on with it, and kill it at the target.

    What the processes say goes to ``<folder>.log``.
    """
    forks = start(config, folder, processes)
    victims = [forks[rank] for rank in (target.victims if target else (0,))]
    # follow the first victim up to the target
    events, killed = [], None
    times = 0
    for phase, when in victims[0].events(time.monotonic() + PATIENCE):
        events.append((phase, when))
        times += target is not None and phase == target.phase
        if target is not None and times > target.occurrence:
            time.sleep(target.delay)
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)
            killed = victims[0].phase
            break
    # the end of all
    codes, waited = collect(forks, PATIENCE if killed is None else GRACE)
    if target is not None and -signal.SIGKILL not in [codes[rank] for rank in target.victims]:
        killed = None
    return Outcome(killed, codes, events, waited)


def collect(forks: list[Fork], seconds: float) -> tuple[list[int], bool]:
    """Wait until all have ended -> their exit codes, and whether one had to be killed for it."""
    until, waited = time.monotonic() + seconds, False
    codes = []
    for fork in forks:
        while True:
            pid, status = os.waitpid(fork.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until:
                os.kill(fork.pid, signal.SIGKILL)
                waited = True
            time.sleep(0.005)
        codes.append(os.waitstatus_to_exitcode(status))
        os.close(fork.pipe)
        fork.now.close()
    return codes, waited


def start(config: Config, folder: Path, processes: int) -> list[Fork]:
    """Fork the processes of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    forks = []
    for rank in range(processes):
        now = mmap.mmap(-1, 1)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            _live(config, folder, now, writer, environment if processes > 1 else {})
        os.close(writer)
        forks.append(Fork(pid, reader, now))
    return forks


def _live(
    config: Config, folder: Path, now: mmap.mmap, writer: int, environment: dict[str, str]
) -> None:
    """Be a process of a run: train, say how it went, end. Never returns."""
    code = 1
    atexit._clear()  # what the parent will do at its own end
    try:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ |= environment
        _watch(now, writer)
        runs.train(config, folder, resume="auto", quiet=True)
        code = 0
    except FlowRLError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


def _watch(now: mmap.mmap, writer: int) -> None:
    """Let the logs say each phase that begins, here and through the pipe."""

    def say(name: str) -> None:
        number = NAMES.index(name)
        now[0] = number
        os.write(writer, EVENT.pack(number, time.monotonic()))

    def watched(real: Any, self: Any, name: str) -> Any:
        @contextmanager
        def noted() -> Iterator[None]:
            say(PHASES[name])
            try:
                with real(self, name):
                    yield
            finally:
                say(BETWEEN)

        return noted()

    say(BETWEEN)
    # figures and page of the end take longer than the run, and hold times
    runs.save_figure, runs.html_report = lambda *_, **__: None, lambda run: ""  # type: ignore
    for kind in (RunLogger, Silence):
        real = kind.phase
        kind.phase = lambda self, name, real=real: watched(real, self, name)  # type: ignore


def contents(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a run that must come out the same."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and file.name not in UNLIKE and not name.startswith("tensorboard/"):
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def warm_up() -> None:
    """Import once what every fork would import, and keep torch to one thread."""
    import torch._dynamo
    import torch.utils.tensorboard
    from accelerate import PartialState  # noqa: F401

    torch.set_num_threads(1)
