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
from types import FrameType
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
EVENT = struct.Struct("<BI")  # the phase that begins, and the calls since the one before
# what depends on the clock, or on the number of a process
UNLIKE = {"timing.jsonl", "summary.json", "report.html", "curves.png", "environment.json", ".lock"}
PATIENCE = 120.0  # seconds for a run that takes one or two
GRACE = 20.0  # seconds for the process whose other one was killed; then it is killed, too


class Target(NamedTuple):
    """Kill after `phase` began for the `occurrence`-th time, 0 = the first: the first victim kills
    itself at its so many-th call of a function, of Python or C; or, without `calls`, is killed
    after so many seconds. The others are killed when it is dead."""

    phase: str
    occurrence: int
    calls: int = 0
    seconds: float = 0.0
    victims: tuple[int, ...] = (0,)


class Outcome(NamedTuple):
    """How a run in forks ended."""

    phase: str | None  # in which it was killed; None: it had ended before
    codes: list[int]  # of all processes, negative for a signal
    events: list[tuple[str, int]]  # of the first victim: phases, and the calls before each
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

    def events(self, until: float) -> Iterator[tuple[str, int]]:
        """Yield each phase that begins, and the calls since the one before, until the process or
        the time is over."""
        while select.select([self.pipe], [], [], max(until - time.monotonic(), 0.0))[0]:
            data = os.read(self.pipe, EVENT.size)
            if len(data) < EVENT.size:
                return
            number, calls = EVENT.unpack(data)
            yield NAMES[number], calls


def run(config: Config, folder: Path, target: Target | None = None, processes: int = 1) -> Outcome:
    """Begin the run in `folder`, or go on with it, and kill it at the target; what the processes
    say goes to ``<folder>.log``."""
    forks = start(config, folder, processes, target)
    ranks = target.victims if target else (0,)
    first, events, seen = forks[ranks[0]], list[tuple[str, int]](), 0
    # follow the first victim to its end
    for event in first.events(time.monotonic() + PATIENCE):
        events.append(event)
        seen += target is not None and event[0] == target.phase
        if target is not None and not target.calls and seen > target.occurrence:
            time.sleep(target.seconds)
            os.kill(first.pid, signal.SIGKILL)
            break
    # the end of all
    phase = first.phase
    codes = {ranks[0]: ended(first, PATIENCE)[0]}
    killed = codes[ranks[0]] == -signal.SIGKILL
    for rank in ranks[1:] if killed else ():
        os.kill(forks[rank].pid, signal.SIGKILL)
    waited = False
    for rank, fork in enumerate(forks):
        if rank not in codes:
            codes[rank], late = ended(fork, GRACE if killed else PATIENCE)
            waited = waited or late
    ends = [codes[rank] for rank in sorted(codes)]
    return Outcome(phase if killed else None, ends, events, waited)


def ended(fork: Fork, seconds: float) -> tuple[int, bool]:
    """Wait until a process has ended -> its exit code, and whether it had to be killed for it."""
    until, late = time.monotonic() + seconds, False
    while True:
        pid, status = os.waitpid(fork.pid, os.WNOHANG)
        if pid:
            break
        if not late and time.monotonic() > until:
            os.kill(fork.pid, signal.SIGKILL)
            late = True
        time.sleep(0.005)
    os.close(fork.pipe)
    return os.waitstatus_to_exitcode(status), late


def start(config: Config, folder: Path, processes: int, target: Target | None) -> list[Fork]:
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
            if processes > 1:
                os.environ |= environment
            _live(config, folder, _Watch(now, writer, _own(target, rank)))
        os.close(writer)
        forks.append(Fork(pid, reader, now))
    return forks


def _own(target: Target | None, rank: int) -> Target | None:
    """Return the target of the process that kills itself."""
    return target if target and target.calls and target.victims[0] == rank else None


def _live(config: Config, folder: Path, watch: _Watch) -> None:
    """Be a process of a run: train, say how it went, end. Never returns."""
    code = 1
    atexit._clear()  # what the parent will do at its own end
    try:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        watch.begin()
        runs.train(config, folder, resume="auto", quiet=True)
        code = 0
    except FlowRLError as error:
        print(f"flowrl: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(code)


class _Watch:
    """Let the logs say each phase that begins, in `now` and through a pipe, count calls, and kill
    this process at its target."""

    def __init__(self, now: mmap.mmap, writer: int, target: Target | None) -> None:
        self.now, self.writer, self.target = now, writer, target
        self.calls, self.times, self.last = 0, 0, 0

    def begin(self) -> None:
        """Take the place of the logs' phases; figures and page of the end take longer than the run
        and hold times: they are left out."""
        runs.save_figure, runs.html_report = lambda *_, **__: None, lambda run: ""  # type: ignore
        runs.curves = lambda run: None  # type: ignore
        for kind in (RunLogger, Silence):
            real = kind.phase
            kind.phase = lambda log, name, real=real: self.noted(real, log, name)  # type: ignore
        sys.setprofile(self.count)
        self.say(BETWEEN)

    @contextmanager
    def noted(self, real: Any, log: Any, name: str) -> Iterator[None]:
        """Say where a phase begins and ends."""
        self.say(PHASES[name])
        try:
            with real(log, name):
                yield
        finally:
            self.say(BETWEEN)

    def say(self, name: str) -> None:
        """Say that a phase begins."""
        number = NAMES.index(name)
        self.now[0] = number
        os.write(self.writer, EVENT.pack(number, self.calls))
        self.calls = 0
        if self.target is not None and name == self.target.phase:
            self.times += 1
            if self.times > self.target.occurrence:
                self.last = self.last or self.target.calls

    def count(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call; at the last one, die."""
        if event in ("call", "c_call"):
            self.calls += 1
            if self.last:
                self.last -= 1
                if not self.last:
                    os.kill(os.getpid(), signal.SIGKILL)


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
