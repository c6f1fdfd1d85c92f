"""Comparisons that are judged at equal evaluations alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from comparekit import COST, plan, tick

from flowrl.cli.main import main
from flowrl.runs.compare import compare as compare_module
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import run_comparison as compare

pytestmark = pytest.mark.integration


def test_without_seconds_runs_end_and_are_judged_by_evaluations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room for 3 iterations; by seconds there had been room for 5."""
    tick(monkeypatch)
    what = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1), budgets=Budgets(2.5 * COST, 0.0, 2))
    monkeypatch.setattr(compare_module, "machine_load", lambda: 99.0)
    result = compare(what)
    assert "seconds mean little" not in capsys.readouterr().err
    runs = [run for config in result["configs"] for run in config["seeds"]]
    assert [run["iterations"] for run in runs] == [3] * 4
    assert all(run["at"]["nfe"] and run["at"]["seconds"] is None for run in runs)
    assert all(list(config["summary"]) == ["nfe"] for config in result["configs"])
    # what is written says nothing of a second budget
    assert main(["compare", "--report-only", "--out", str(what.out)]) == 0
    text = capsys.readouterr().out + what.out.with_suffix(".md").read_text()
    assert "at (a)" in text and "(b)" not in text and "0 seconds" not in text
    assert "network evaluations (evaluation and checkpoints not counted), measured at" in text
    drawn = {file.name for file in what.out.parent.glob("*.png")}
    assert drawn == {"result-gains.png", "result-nfe.png", "result-training.png"}
