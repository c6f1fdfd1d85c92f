"""The command line as a process of its own: what is imported, a line within a second, signals,
Ctrl-C while it starts and ends, and readers that go away."""

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

from flowrl.cli.main import GROUPS, main

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


# ------------------------------------------------------------------------------------ signs of life


# of each command, arguments with which it has something to do; {toy} is a config, {out} a folder
LINES = {
    "doctor": "{toy} --plugin toykit",
    "train": "{toy} --plugin toykit --run {out}/run",
    "compare": "{toy} --plugin toykit --runs {out}/c --out {out}/c.json --nfe 1",
    "tune": "{toy} --plugin toykit --try train.group=2,3 --out {out}/t --nfe 1",
    "estimate": "shapes/flow_grpo --card 24",
    "bench": "{toy} --plugin toykit --iterations 1",
    "pairs": "{out} --out {out}/pairs",
    "eval": "{toy} --plugin toykit",
    "sweep": "{toy} --plugin toykit --suite shapes --count 1",
    "measure": "{out} --measure vendi",
    "sample": "{toy} --plugin toykit dot --out {out}/s.png",
    "grid": "{out}",
    "report": "{out}",
    "view": "{out} --port 0",
    "export": "{out}",
    "score": "--reward jpeg --selftest",
    "serve-rewards": "{toy} --plugin toykit --port 0",
    "configs": "",
    "methods": "",
    "schema": "",
    "new": "reward mine --folder {out}/new",
    "tiny": "sd3 {out}/tiny",
}
MOST = 1.0  # seconds of a processor; a quiet machine takes no longer by the clock


def spent(pid: int) -> float:
    """Return the processor seconds of a process, in user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_every_command_is_here() -> None:
    assert sorted(LINES) == sorted(name for group in GROUPS.values() for name in group)


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_line_within_a_second(name: str, tmp_path: Path) -> None:
    """Also where it is a mistake that is said."""
    line = LINES[name].format(toy=write_toy(tmp_path), out=tmp_path)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "kits")])
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", name, *line.split()],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    seconds = spent(process.pid)
    process.kill()
    process.communicate()
    assert first and seconds < MOST, f"{name}: {seconds} s"


def test_train_says_that_it_loads_before_torch_is_imported(tmp_path: Path) -> None:
    """One line, in the first of several processes alone, and none where nobody is to be told. The
    libraries are played, by modules that say when they are imported."""
    for name in ("torch", "scipy"):
        (tmp_path / f"{name}.py").write_text("import sys\nprint(__name__, file=sys.stderr)\n")
    code = (
        "import sys; from flowrl.cli.start_up import say_when_loading as say; say('loading'); "
        "import json, typing; assert 'torch' not in sys.modules; import torch, scipy"
    )
    paths = os.pathsep.join([str(tmp_path), str(TESTS.parent)])
    for rank, said in (("0", "loading\ntorch\nscipy\n"), ("1", "torch\nscipy\n")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": paths, "RANK": rank},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, said)


# ------------------------------------------------------------------------------- Ctrl-C at the ends


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
