"""Ctrl-C while a command starts and while its process ends: one line, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
# an import that takes long, and makes another error of an exception in it
SLOW = """
import pathlib, time
pathlib.Path({reached!r}).touch()
try:
    time.sleep(600)
except BaseException:
    raise ImportError("something in here failed")
"""
AT_EXIT = """
import atexit, pathlib, sys, time
from flowrl.__main__ import command
atexit.register(lambda: (pathlib.Path({reached!r}).touch(), time.sleep(600)))
sys.argv = ["flowrl", "--version"]
sys.exit(command())
"""


def interrupted(folder: Path, *argv: str) -> tuple[int, str]:
    """Start Python, send Ctrl-C once `folder`/reached is there -> exit code and what it said."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *argv],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 300
    while not (folder / "reached").exists() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    return process.returncode, error


@pytest.mark.parametrize("command", [["train", "shapes/flow_grpo"], ["estimate"], ["methods"]])
def test_while_modules_are_imported(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW.format(reached=str(tmp_path / "reached")))
    code, said = interrupted(tmp_path, "-m", "flowrl", *command)
    assert (code, said) == (130, "\nflowrl: stopped before it began\n")


def test_while_a_command_imports_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SLOW.format(reached=str(tmp_path / "reached")))
    code, said = interrupted(tmp_path, "-m", "flowrl", "train", "shapes/flow_grpo")
    begun, stopped = said.split("\n\n")
    assert (code, begun) == (130, "flowrl train: loading ...") and stopped.count("\n") == 1
    assert stopped.startswith("flowrl: stopped")


def test_after_the_command(tmp_path: Path) -> None:
    """What is done is done: its own exit code."""
    code, said = interrupted(tmp_path, "-c", AT_EXIT.format(reached=str(tmp_path / "reached")))
    assert (code, said) == (0, "")
