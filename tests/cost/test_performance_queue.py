"""The script that measures many settings in one call, on tiny models and a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from estimatekit import model_config
from scriptkit import script_module
from tiny import tiny_sd3

from flowrl.config.load import load_config


def tiny_config(folder: Path) -> Path:
    """Write the config of a tiny SD3 whose weights are not there."""
    tiny_sd3(folder / "weights")
    for file in (folder / "weights").rglob("*.safetensors"):
        file.unlink()
    model_config(folder, f"{{fn: sd3, path: {folder}/weights, device: cpu}}")  # and its prompts
    toy = yaml.safe_load((folder / "toy" / "toy.yaml").read_text())
    toy["model"] = {"fn": "sd3", "path": f"{folder}/weights", "device": "cpu"}
    toy["image"] = {"height": 64, "width": 64}
    toy["rewards"] = {"red": {"fn": "jpeg"}, "strict": {"fn": "jpeg", "weight": 0.0}}
    (folder / "it.yaml").write_text(yaml.safe_dump(toy))
    return folder / "it.yaml"


@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses what a CPU refuses")
def test_rows_are_measured_in_turn_and_one_that_fails_takes_none_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """flash and the check for waits need a GPU and say so; what has figures is not measured
    again."""
    script, out = script_module("performance_queue"), tmp_path / "queue.json"
    argv = ["q", "--model", f"sd3={tiny_config(tmp_path)}", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*argv, "--rows", "sd3 native,sd3 flash,sd3 sync,nccl"])
    assert script.main() == 0
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["sd3 native", "sd3 sync check", "nccl", "sd3 flash"]
    assert rows["sd3 native"]["result"]["seconds"]["train"] > 0
    assert rows["sd3 native"]["result"]["runtime"]["attention"] == "native"
    assert rows["nccl"]["result"]["right"] is True
    assert "'flash' does not work here" in rows["sd3 flash"]["failed"]
    assert "--sync-check: needs a CUDA device" in rows["sd3 sync check"]["failed"]
    said = capsys.readouterr().out
    assert "gloo on cpu: right" in said and "sd3 native" in said

    asked: list[str] = []

    def played(row: Any, *_: Any) -> dict[str, Any]:
        asked.append(row.name)
        return dict(rows[row.name])

    monkeypatch.setattr(script, "run", played)
    monkeypatch.setattr("sys.argv", [*argv, "--rows", "sd3 native,sd3 flash,nccl", "--go-on"])
    assert script.main() == 0
    assert asked == ["sd3 flash"]
    again = json.loads(out.read_text())["rows"]
    assert {row["row"] for row in again} == {"sd3 native", "nccl", "sd3 flash"}


def test_the_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is played here: 10 minutes, of which each row takes its own limit of 4; the fourth
    and all after it are left out and named."""
    script, out, clock, limits = script_module("performance_queue"), tmp_path / "a.json", [0.0], []

    def hangs(words: list[str], *, timeout: float, **_: Any) -> None:
        limits.append(timeout)
        clock[0] += timeout
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(script.subprocess, "run", hangs)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.argv", ["q", "--out", str(out), "--minutes", "10"])
    assert script.main() == 1
    assert limits == [240, 240, 120]
    found = json.loads(out.read_text())
    assert [row["failed"] for row in found["rows"]] == ["ended after 240 s"] * 2 + [
        "ended after 120 s"
    ]
    assert found["left_out"] == [row.name for row in script.QUEUE[3:]]


def test_every_row_is_a_config_that_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are told apart, and each setting is one that the loader takes."""
    script = script_module("performance_queue")
    names = [row.name for row in script.QUEUE]
    assert len(names) == len(set(names))
    for row in script.QUEUE:
        if row.model:
            config, *overrides = script.MODELS[row.model]
            load_config(config, [*overrides, *row.settings])
    assert {row.model for row in script.QUEUE} == {*script.MODELS, ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "sdxl"], "--rows: no row begins with 'sdxl'; there are sd3 native, flux"),
        (["--model", "sdxl=a.yaml"], "--model: expected sd3|flux|wan|qwen_image=CONFIG, got"),
        (["--go-on"], "expected a file that this command wrote"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    out = tmp_path / "a.json"
    out.write_text("[]")
    monkeypatch.setattr("sys.argv", ["q", *words, "--out", str(out)])
    assert script_module("performance_queue").main() == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
