"""Start several processes that know of each other, as ``torchrun`` would."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import warm

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


KITS = Path(__file__).parent
PATIENCE, GRACE = 1200.0, 60.0  # seconds: for both processes, and for the other where one failed


def run_pair(*command: str) -> list[tuple[int, str]]:
    """Run a command in two processes -> exit code and stderr of each.

    Where one ends with an error, the other would wait for it: it is stopped after a while.
    """
    return run_both([[*command]] * 2, ranks((0, 1)))


def run_nodes(folders: Sequence[Path], *command: str) -> list[tuple[int, str]]:
    """Run a command in two processes that believe to be on two machines, the first of each, in
    folders of their own -> exit code and stderr of each."""
    return run_both([[*command]] * 2, ranks((0, 0)), folders)


def ranks(local: tuple[int, int]) -> list[dict[str, str]]:
    """Return what `torchrun` tells each of two processes, whose ranks on their machines these
    are."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    return [shared | {"RANK": str(n), "LOCAL_RANK": str(own)} for n, own in enumerate(local)]


def free_port() -> str:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_both(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    folders: Sequence[Path | None] = (None, None),
) -> list[tuple[int, str]]:
    """Run two commands of Python side by side -> exit code and stderr of each."""
    with tempfile.TemporaryDirectory() as place:
        started, logs = [], []
        for number, (command, own, folder) in enumerate(
            zip(commands, environments, folders, strict=True)
        ):
            logs.append(Path(place) / str(number))
            started.append(warm.start(command, logs[-1], environment=own, folder=folder))
        codes = wait_for_all(started)
        return [(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def wait_for_all(started: list[BaseProcess]) -> list[int]:
    """Wait until all processes have ended -> exit codes."""
    until = time.monotonic() + PATIENCE
    while any(process.is_alive() for process in started) and time.monotonic() < until:
        if any(process.exitcode for process in started):
            until = min(until, time.monotonic() + GRACE)
        time.sleep(0.05)
    codes = []
    for process in started:
        process.kill()
        process.join()
        codes.append(-1 if process.exitcode is None else process.exitcode)
    return codes


def pair(jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Do jobs in one pair of processes -> by the job's name, what each process answered.

    `process.py` says what a job is.
    """
    (folder / "jobs.json").write_text(json.dumps([*jobs.values()]))
    done = run_pair(str(KITS / "process.py"), str(folder / "jobs.json"), str(folder))
    told = []
    for rank, (code, said) in enumerate(done):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        assert code == 0 and len(lines) == len(jobs), f"process {rank} of 2: {code}\n{said}"
        told.append([json.loads(line) for line in lines])
    return {name: list(both) for name, both in zip(jobs, zip(*told, strict=True), strict=True)}
