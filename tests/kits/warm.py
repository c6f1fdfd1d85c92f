"""Processes of Python that begin with the libraries imported, as forks of one that has computed
nothing: an import of torch and diffusers takes longer than most of what tests do with them."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

KITS = Path(__file__).parent
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "flowrl.cli.main",
        "flowrl.runs.train",
        "flowrl.models.sd3",
        "flowrl.models.wan",
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.utils.tensorboard",
        "toykit",
    ]
)


def start(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> BaseProcess:
    """Start ``python COMMAND``, which is ``-m MODULE ...`` or a file and its arguments -> the
    process. What it says is added to `log`; variables of `environment` are put into this one's."""
    shared = {"PYTHONPATH": f"{KITS.parents[1]}{os.pathsep}{KITS}", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **shared, **(environment or {})}
    where = str(folder or Path.cwd())
    given = ([*command], str(log), variables, where)
    process = CONTEXT.Process(target=_live, args=given, daemon=True)
    process.start()
    return process


def _live(command: list[str], log: str, variables: dict[str, str], folder: str) -> None:
    """Be the process; never returns."""
    code = 1
    # the server may have begun while a test held signals back, and its forks hold what it holds
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(said, stream)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        import torch

        torch.set_num_threads(1)
        code = _run(command)
    except BaseException:
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            output.flush()
        os._exit(code)


def _run(command: list[str]) -> int:
    """Run a module or a file as Python would -> the exit code."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def run(command: Sequence[str], log: Path, folder: Path | None = None) -> tuple[int, str]:
    """Run a command as `start` does to its end -> exit code, what it said."""
    process = start(command, log, folder=folder)
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()
