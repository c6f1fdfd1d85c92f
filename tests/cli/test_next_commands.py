"""What `flowrl train` says at its end in a terminal: three commands that work as they stand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flowrl.cli import train as module
from flowrl.cli.main import main

pytestmark = pytest.mark.integration


def test_the_next_three_commands_work_as_they_stand(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [f"{home}/toy.yaml", "train.iterations=1", "eval.images=1", "--plugin", "toykit"]
    # a log file hears nothing of them, and neither does who wants it quiet
    assert main(["train", *line, "--run", "plain"]) == 0
    monkeypatch.setattr(module, "in_terminal", lambda: True)
    assert main(["train", *line, "--run", "quiet", "--quiet"]) == 0
    assert "try next" not in capsys.readouterr().err
    # each is run as a shell would
    assert main(["train", *line, "--run", "a run"]) == 0
    said = capsys.readouterr().err.partition("try next:\n")[2].splitlines()
    commands = [shlex.split(each) for each in said]
    assert [words[:3] for words in commands[:2]] == [
        ["flowrl", "sample", "a run"],
        ["flowrl", "eval", "a run"],
    ]
    assert len(commands) == 3 and commands[2][:2] == ["flowrl", "export"]
    for words in commands[:2]:  # the toy is no pipeline that could be exported
        assert main(words[1:]) == 0, words
    assert (tmp_path / "samples.png").exists()
