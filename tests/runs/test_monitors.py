"""Monitors of whole runs: what they say and do, also over a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runkit import config_for, rows

from flowrl.config.monitors import PlateauMonitor
from flowrl.core.errors import ConfigError
from flowrl.runs.monitors.plateau import plateau
from flowrl.runs.train import train


def evals(*scores: float, start: int = 0) -> list[dict[str, Any]]:
    """Return evaluations every 10 iterations."""
    return [{"iteration": 10 * i + start, "score": "red", "red": s} for i, s in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "min_gain", "since"),
    [
        # counted by hand: evaluations after the last one that rose above all before
        ([0.3], 0.0, 0),
        ([0.3, 0.4, 0.4, 0.39], 0.0, 2),
        ([0.3, 0.4, 0.35, 0.41], 0.0, 0),
        ([0.3, 0.4, 0.41, 0.42], 0.05, 2),
        ([0.3, 0.4, 0.42, 0.44, 0.46], 0.05, 0),  # small gains add up
        ([0.9, 0.2, 0.1], 0.0, 2),  # the base model was never beaten
    ],
)
def test_plateau(scores: list[float], min_gain: float, since: int) -> None:
    for patience in (1, 2, 3):
        found = plateau(PlateauMonitor(patience, min_gain), evals(*scores))
        assert (found is not None) == (since >= patience)
        assert found is None or f"in {since} evaluations" in found.what


def test_plateau_counts_one_score_only() -> None:
    """A run that goes on may be given another headline: what was before says nothing of it."""
    both = [*evals(0.9, 0.9, 0.9), *({**row, "score": "strict", "strict": 0.1} for row in evals(0))]
    assert plateau(PlateauMonitor(1), both) is None


STOP = ("eval.every=1", "monitors.plateau={patience: 2, min_gain: 9, action: stop}")


@pytest.mark.integration
def test_stop_ends_a_run_as_if_it_were_done(home: Path, tmp_path: Path) -> None:
    """No score rises by 9, so the second evaluation after the first one ends the run; up to there
    it is the run without monitors. Gone on with, it stays ended, and goes on once it may."""
    run = tmp_path / "run"
    summary = train(config_for(home, *STOP), run, quiet=True)
    assert summary["iterations"] == 2 and summary["stopped"]["monitor"] == "plateau"
    assert [row["iteration"] for row in rows(run / "eval.jsonl")] == [0, 1, 2]
    (found,) = rows(run / "findings.jsonl")
    assert (found["iteration"], found["action"]) == (2, "stop")
    assert "stopped after 2 iterations by the monitor plateau" in (run / "report.html").read_text()
    for name in ("current", "ema", "optimizer"):
        file = f"checkpoints/000002/{name}.safetensors"
        assert (run / file).read_bytes() == (home / "whole" / file).read_bytes()
    # again, and in a checkpoint that was saved before the evaluation was looked at
    assert train(config_for(home, *STOP), run, resume=True, quiet=True) == summary
    assert len(rows(run / "findings.jsonl")) == 1
    on = config_for(home, STOP[0], "monitors.plateau=null")
    assert train(on, run, resume=True, quiet=True)["iterations"] == 4
    assert (run / "metrics.jsonl").read_bytes() == (home / "whole/metrics.jsonl").read_bytes()


@pytest.mark.integration
def test_warnings_change_nothing(home: Path, tmp_path: Path) -> None:
    """With every monitor at `warn` and firing, weights and logs are those without monitors; a
    resume writes each finding once."""
    run = tmp_path / "run"
    warn = (STOP[0], STOP[1].replace("stop", "warn"))
    train(config_for(home, *warn), run, quiet=True)
    (found,) = rows(run / "findings.jsonl")
    assert (found["iteration"], found["action"]) == (2, "warn")
    for name in ("checkpoints/000004/current.safetensors", "metrics.jsonl"):
        assert (run / name).read_bytes() == (home / "whole" / name).read_bytes()
    before = (run / "findings.jsonl").read_bytes()
    state = json.loads((run / "checkpoints/000004/state.json").read_text())["monitors"]
    shutil.rmtree(run / "checkpoints" / "000004")
    shutil.rmtree(run / "checkpoints" / "000003", ignore_errors=True)
    train(config_for(home, *warn), run, resume=True, quiet=True)
    assert (run / "findings.jsonl").read_bytes() == before
    again = json.loads((run / "checkpoints/000004/state.json").read_text())["monitors"]
    assert again == state and state["findings"] == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("monitors.plateu={}", "monitors has no section 'plateu'"),
        ("monitors.plateau.patence=2", "patence"),
        ("monitors.plateau.patience=0", "monitors.plateau.patience: expected a whole number >= 1"),
        ("monitors.plateau.action=halt", "expected one of 'warn', 'stop'"),
        ("monitors.plateau=3", "monitors.plateau: expected keys and values, got 3"),
    ],
)
def test_wrong_options(home: Path, wrong: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config_for(home, wrong)
