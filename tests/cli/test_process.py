"""The command line as a process of its own: what is imported, signals, and readers that go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from toykit import write_toy

from flowrl.cli.main import main

pytestmark = pytest.mark.integration
TESTS = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "scipy", "diffusers", "transformers", "matplotlib", "yaml")
"""What the help must not wait for: with any of these it takes more than 0.3 seconds."""


def spawn(*argv: str | Path, **options: int) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "kits")])
    environment = {**os.environ, "PYTHONPATH": paths}
    # it would hide what is only written when the process ends
    environment.pop("PYTHONUNBUFFERED", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, *map(str, argv)], env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def imported_by(*argv: str) -> tuple[set[str], str]:
    """Run a command -> the modules that it imports, which ``-X importtime`` writes to stderr, and
    what it printed."""
    process = spawn("-X", "importtime", "-m", "flowrl", *argv)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    names = {line.rpartition("|")[2].strip() for line in error.splitlines()}
    assert "flowrl.cli.main" in names
    return names, out


def test_the_help_is_light() -> None:
    imported, out = imported_by("--help")
    assert "Usage: flowrl" in out and imported.isdisjoint(HEAVY)


def test_the_list_of_methods_is_light() -> None:
    """It reads its catalogue by yaml, and nothing else that is heavy."""
    imported, out = imported_by("methods")
    assert "Flow-GRPO" in out and "yaml" in imported
    assert imported.isdisjoint({*HEAVY, "peft", "accelerate", "pandas"} - {"yaml"})


def test_a_report_needs_no_torch(home: Path, tmp_path: Path) -> None:
    """It reads files and draws nothing; neither does the list of configs need it."""
    for line in (("report", f"{home}/whole", "--out", f"{tmp_path}/r.html"), ("configs",)):
        imported, _ = imported_by(*line)
        assert imported.isdisjoint({"torch", "diffusers", "transformers", "matplotlib"})
    assert (tmp_path / "r.html").exists()


def test_a_reader_that_goes_away() -> None:
    """As in `flowrl configs | head -0`."""
    read, write = os.pipe()
    os.close(read)
    process = spawn("-m", "flowrl", "configs", stdout=write)
    os.close(write)
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    """Stopped in the third iteration of five, with the message of how to go on; resumed here, it
    ends as without.

    The reward waits in its fourth call (the first is the evaluation before training) until it may
    go on, so that the signal always comes in the same iteration.
    """
    # an unbroken run, and one that is stopped from outside
    config, go = write_toy(tmp_path), tmp_path / "go"
    gate = f"rewards.red={{fn: toykit.gate, file: {go}, call: 4}}"
    options = [gate, "train.iterations=5", "--plugin", "toykit"]
    assert main(["train", str(config), *options, "--run", f"{tmp_path}/whole", "--quiet"]) == 0
    go.touch()
    words = ["-m", "flowrl", "train", str(config), *options, "--run", f"{tmp_path}/run"]
    process = warm.start(words, tmp_path / "log")
    reached, until = go.with_suffix(".reached"), time.monotonic() + 300
    while not reached.exists() and process.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    go.unlink()
    process.join(300)
    error = (tmp_path / "log").read_text()
    # it says how to go on
    assert process.exitcode == 130 and "Traceback" not in error, error
    saved = f"{tmp_path}/run/checkpoints/000003"
    assert f"flowrl: stopped after iteration 3, saved {saved}; go on with: " in error
    command = error.rsplit("go on with: ", 1)[1].split()
    assert command == ["flowrl", "train", "--resume", f"{tmp_path}/run", "--plugin", "toykit"]
    torch.manual_seed(3)
    assert main([*command[1:], "--quiet"]) == 0
    # and the end is the same
    weights = [f"checkpoints/000005/{n}.safetensors" for n in ("current", "ema", "optimizer")]
    for name in ("metrics.jsonl", "eval.jsonl", "grid.png", *weights):
        whole, resumed = (tmp_path / folder / name for folder in ("whole", "run"))
        assert resumed.read_bytes() == whole.read_bytes(), name
