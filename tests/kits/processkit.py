"""Start several processes that know of each other, as ``torchrun`` would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


KITS = Path(__file__).parent
PATIENCE, GRACE = 1200.0, 60.0  # seconds: for both processes, and for the other where one failed


def run_pair(*command: str) -> list[tuple[int, str]]:
    """Run a command in two processes -> exit code and stderr of each.

    Where one ends with an error, the other would wait for it: it is stopped after a while.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{KITS.parents[1]}{os.pathsep}{KITS}"}
    with ExitStack() as stack:
        started, logs = [], []
        for rank in range(2):
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            argv = [sys.executable, *command]
            started.append(subprocess.Popen(argv, env=environment, stdout=log, stderr=log))
            logs.append(log)
        codes = wait_for_all(started)
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read())
    return list(zip(codes, said, strict=True))


def wait_for_all(started: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all processes have ended -> exit codes."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in started) and time.monotonic() < until:
        if any(process.poll() for process in started):
            until = min(until, time.monotonic() + GRACE)
        time.sleep(0.05)
    for process in started:
        process.kill()
    return [process.wait() for process in started]


def pair(jobs: dict[str, dict[str, Any]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Do jobs in one pair of processes -> by the job's name, what each process answered.

    `process.py` says what a job is. Two processes for all, since each imports torch for seconds.
    """
    (folder / "jobs.json").write_text(json.dumps([*jobs.values()]))
    done = run_pair(str(KITS / "process.py"), str(folder / "jobs.json"), str(folder))
    told = []
    for rank, (code, said) in enumerate(done):
        lines = (folder / f"{rank}.jsonl").read_text().splitlines()
        assert code == 0 and len(lines) == len(jobs), f"process {rank} of 2: {code}\n{said}"
        told.append([json.loads(line) for line in lines])
    return {name: list(both) for name, both in zip(jobs, zip(*told, strict=True), strict=True)}
