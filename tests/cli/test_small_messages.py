"""What the system refuses is one small message, and no traceback."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toykit import write_toy

from flowrl.cli.main import GROUPS, main

ROOT = Path(__file__).parents[2]
LONG = "x" * 300
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", LONG],
        ["sample", LONG, "a circle"],
        ["export", LONG],
        ["train", "--resume", LONG],
        ["train", f"{LONG}.yaml"],
        ["grid", LONG],
        ["configs", LONG],
        ["schema", "--out", LONG],
    ],
    ids=lambda argv: argv[0],
)
def test_names_that_are_too_long(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, error = capsys.readouterr()
    assert error.count("flowrl: ") == 1 and "Traceback" not in error and out == ""


@pytest.mark.parametrize("last", [["--run", ""], ["--run="]])
def test_an_option_with_an_empty_value(
    last: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    """As a path it would be the working folder: ``--run "$UNSET"``."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "shapes/flow_grpo", *last]) == 2
    assert "--run: expected a value, got an empty text" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["estimate"]])
@pytest.mark.parametrize("what", ["pipe", "empty", "no text"])
def test_a_list_that_cannot_be_one_is_refused_alike(
    command: list[str], what: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A list that is not there may be put there later; one that is there and none is a mistake."""
    config, file = write_toy(tmp_path), tmp_path / "list.txt"
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.write_text("")
    path = "" if what == "no text" else str(file)
    argv = [command[0], str(config), "--plugin", "toykit", f"prompts.test={path!r}", *command[1:]]
    argv += ["--run", str(tmp_path / "run")] if command == ["train"] else []
    assert main(argv) == 2
    said = {"pipe": "got a pipe or a device", "empty": "at least one prompt", "no text": "empty"}
    error = capsys.readouterr().err
    assert said[what] in error and "Traceback" not in error


@pytest.mark.parametrize("command", [["train"], ["train", "--dry-run"], ["estimate"]])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rewards={iteration: {fn: toykit.redness}}", "'iteration' is a key of an evaluation's"),
        ("rewards={nfe: {fn: toykit.redness}}", "'nfe' is a key of an evaluation's line"),
        ("eval.best_by=rad", "eval.best_by: the config has no reward 'rad'; did you mean 'red'?"),
        ("train.balance=color", "so each record needs a text or a number under this key"),
    ],
)
def test_what_a_run_refuses_is_refused_before_it(
    command: list[str],
    change: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """A headline named `iteration` had written its score over the iteration in `eval.jsonl`."""
    monkeypatch.chdir(tmp_path)
    argv = [command[0], str(write_toy(tmp_path)), "--plugin", "toykit", change, *command[1:]]
    assert main(argv) == 2
    assert said in capsys.readouterr().err
    assert not [*tmp_path.glob("runs/*/config.yaml")]


def test_a_pipe_as_a_config_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert main(["train", f"{tmp_path}/pipe.yaml", "--run", f"{tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert "expected a file or a folder, got a pipe or a device" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["configs"]])
def test_a_full_disk_behind_standard_output(argv: list[str]) -> None:
    command = [sys.executable, "-m", "flowrl", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.stderr == "\nflowrl: standard output: No space left on device\n"
    assert done.returncode == 2


COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
READERS = [name for name, it in COMMANDS.items() if "plugin" in inspect.signature(it).parameters]
READERS.remove("tiny")  # it takes the adapters of a plugin, and no config


@pytest.mark.parametrize("name", READERS)
def test_every_command_that_reads_a_config_knows_set(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads a config takes plugins; a word without = is refused before anything else."""
    more = {"sample": ["a dot"], "sweep": ["--suite", "shapes"], "score": ["--reward", "x"]}
    assert main([name, "shapes/flow_grpo", *more.get(name, []), "--set", "mistyped"]) == 2
    assert "expected KEY=VALUE, got mistyped" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["mps", "gpu", "meta"])
def test_a_device_that_flowrl_does_not_run_on(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "shapes/flow_grpo", f"model.device={device}"]) == 2
    assert f"expected 'auto', 'cpu' or 'cuda[:n]', got '{device}'" in capsys.readouterr().err
