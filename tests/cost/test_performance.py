"""The script that measures at real size: several settings beside each other."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm
from estimatekit import model_config
from scriptkit import script_module
from tiny import tiny_sd3


def command(folder: Path) -> list[str]:
    """Return the command line for a config of a tiny SD3, whose weights are not there."""
    tiny_sd3(folder / "weights")
    for file in (folder / "weights").rglob("*.safetensors"):
        file.unlink()
    model = f"{{fn: sd3, path: {folder}/weights, device: cpu}}"
    model_config(folder, model)
    text = (folder / "toy" / "toy.yaml").read_text()
    text = text.replace("toykit.redness", "jpeg").replace("toykit.reddish", "jpeg")
    (folder / "it.yaml").write_text(text)
    argv = ["performance.py", f"{folder}/it.yaml", f"model={model}"]
    return [*argv, "image={height: 64, width: 64}", "--iterations", "1"]


@pytest.mark.integration
def test_settings_are_compared_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each, also for a back end that no CPU has, which says why; the other figures are of
    the first that runs. Each has a process of its own."""
    script, out = script_module("bench/performance"), tmp_path / "a.json"

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        code, said = warm.run(words[1:], tmp_path / "log")
        return subprocess.CompletedProcess(words, code, b"", said.encode())

    monkeypatch.setattr(script.subprocess, "run", run)
    argv = [*command(tmp_path), "--attention", "flash,native", "--json", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    assert script.main() == 0
    result = json.loads(out.read_text())
    flash, native = result["settings"]
    assert flash["setting"] == ["model.runtime.attention=flash"] and "flash" in flash["failed"]
    assert native["seconds"] == result["seconds"] and native["images_per_s"] > 0
    said = capsys.readouterr().out
    assert "attention=native" in said and "cannot: " in said


def test_all_combinations_are_measured_and_none_that_runs_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are played here: each fails with a line of its own."""
    script, asked = script_module("bench/performance"), []

    def failing(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append([word for word in words if word.startswith("model.runtime")])
        said = f"performance: no {asked[-1][0].split('=')[1]} here".encode()
        return subprocess.CompletedProcess(words, 2, b"", said)

    monkeypatch.setattr(script.subprocess, "run", failing)
    argv = ["performance.py", "sd3/flow_grpo", "--attention", "flash,xformers"]
    monkeypatch.setattr("sys.argv", [*argv, "--compile", "all"])
    assert script.main() == 2
    on = "model.runtime.compile=true"
    ways = (["model.runtime.compile=false"], [on], [on, "model.runtime.cuda_graphs=true"])
    pairs = itertools.product(("flash", "xformers"), ways)
    assert asked == [[f"model.runtime.attention={one}", *way] for one, way in pairs]
    said = capsys.readouterr().err
    assert "no setting runs here" in said and "no xformers here" in said
