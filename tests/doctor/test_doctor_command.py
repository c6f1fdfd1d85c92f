"""`flowrl doctor` as a command: table, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli.main import main

# no weights are needed for these sections
QUICK = ["doctor", "shapes/flow_grpo", "--only", "batch", "--only", "prompts"]


def test_a_silent_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """512 images of 64 prompts, 242 and 66 prompts: as docs/shapes.md and the config say."""
    file = tmp_path / "doctor.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "64 prompts x 8 images = 512 images" in said and "nothing to change was found" in said
    written = json.loads(file.read_text())
    assert written["findings"] == [] and written["sections"]["batch"]["figures"]["images"] == 512
    figures = written["sections"]["prompts"]["figures"]
    assert (figures["train"], figures["test"], figures["same"]) == (242, 66, 0)


def test_findings_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """64 states in 40 updates are 32 parts of 2."""
    assert main([*QUICK, "train.updates=40"]) == 1
    said = capsys.readouterr().out
    assert "batch/updates" in said and "make only 32" in said and "change  take a" in said
    assert main([*QUICK, "train.updates=40", "--known", "batch/updates"]) == 0
    capsys.readouterr()
    assert main([*QUICK, "train.updates=40", "--json", "-"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "batch/updates"
    assert main([*QUICK, "--known", "batch/update"]) == 2
    assert "did you mean 'batch/updates'" in capsys.readouterr().err
