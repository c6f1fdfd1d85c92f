"""Two machines: a process on each, which share nothing but the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairkit import command, same_rows, same_weights
from process import commanded
from processkit import run_nodes


@pytest.mark.integration
def test_two_machines_make_the_run_of_one(tmp_path: Path) -> None:
    """Each is started by its own torchrun, in a folder of its own with its own config and prompts:
    weights, metrics and evaluations are those of one process, and only the first machine writes."""
    for name in ("one", "first", "second"):
        (tmp_path / name).mkdir()
    assert commanded(command(tmp_path / "one", "run"))["code"] == 0
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (command(folder, "run") for folder in folders)
    here, there = (
        [word.replace(f"{f}/", "") for word in words]
        for f, words in zip(folders, (first, second), strict=True)
    )
    assert here == there  # names of files are those of the machine that they are read on
    ends = run_nodes(folders, "flowrl", *here)
    assert [code for code, _ in ends] == [0, 0], ends
    one, run = tmp_path / "one" / "run", folders[0] / "run"
    same_rows(one, run, "metrics.jsonl")
    same_rows(one, run, "eval.jsonl")
    same_weights(one, run, "000004", ["current"], 1e-6)
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    assert not (folders[1] / "run").exists()
