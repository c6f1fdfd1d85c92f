"""Comparisons that are judged at equal evaluations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparekit import COST, plan, tick
from toykit import toy

from flowrl.cli.main import main
from flowrl.runs.compare import compare as compare_module
from flowrl.runs.compare.budgets import Budgets, comparable, different
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.folder import read_rows

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


KL = "kl={fn: transition_kl, beta: 0.1}"
SKIPS, OFF = "monitors.gradients.factor=2", "monitors.gradients=null"
FOLLOWS = "monitors.adaptive_kl={target: 9.0, step: 2}"


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        ((), (SKIPS,), True),
        ((), (OFF,), True),
        ((SKIPS,), (OFF,), True),
        ((KL, FOLLOWS), (KL,), True),
        ((KL, FOLLOWS, OFF), (KL, FOLLOWS), True),
        # it says what it saw, and every step is made
        ((OFF,), ("monitors.gradients.action=warn", SKIPS), False),
        ((), ("monitors.gradients.factor=10",), False),
        ((), ("monitors.drift=null", "monitors.hacking.action=stop"), False),
    ],
)
def test_what_acts_on_training_is_part_of_a_run(
    tmp_path: Path, one: tuple[str, ...], two: tuple[str, ...], differ: bool
) -> None:
    """Which steps are skipped, and the weight of the KL; the other monitors have no say."""
    a, b = (comparable(toy(tmp_path, *changes)) for changes in (one, two))
    assert bool(different(a, b)) == differ == (json.dumps(a) != json.dumps(b))


def test_a_file_without_monitors_is_one_of_their_defaults(tmp_path: Path) -> None:
    """As earlier versions wrote them: they can be added to."""
    assert "monitors" not in comparable(toy(tmp_path))


def test_the_weight_of_the_kl_follows_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run of its own: it halves with each iteration whose KL is far below the target."""
    tick(monkeypatch)
    what = plan(tmp_path, budgets=Budgets(2.5 * COST, 0.0, 1))
    what = what._replace(overrides=(*what.overrides, KL, FOLLOWS))
    (run,) = compare(what, quiet=True)["configs"][0]["seeds"]
    rows: list[dict[str, Any]] = read_rows(what.runs / "toy-a" / "seed0", "metrics.jsonl")
    assert run["failed"] is None and all(row["kl"] < 6 for row in rows)
    assert [row.get("kl_weight", 0.1) for row in rows] == pytest.approx([0.1, 0.05, 0.025])
