"""A comparison whose runs train at the same time."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from comparekit import COST, no_training, plan, scores
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError, RewardError
from flowrl.runs.compare import side_by_side
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.stop import Interrupted

CALLS = Budgets(2.5 * COST, 0.0, 2)
TIMES = ("seconds", "load", "environment")


def timeless(result: Any) -> Any:
    """Return a result without what a clock said."""
    if isinstance(result, dict):
        return {key: timeless(value) for key, value in result.items() if key not in TIMES}
    return [timeless(one) for one in result] if isinstance(result, list) else result


@pytest.mark.integration
def test_runs_side_by_side_are_those_of_one_process(tmp_path: Path) -> None:
    """Two configs, two at a time: scores and traced metrics are equal to the bit, and nothing is
    trained again."""
    one = plan(tmp_path, "toy-a", "toy-b", budgets=CALLS)
    several = one._replace(runs=tmp_path / "two", out=tmp_path / "two.json", processes=2)
    want, found = compare(one, quiet=True), compare(several, quiet=True)
    assert timeless(scores(found)) == timeless(scores(want))
    with pytest.MonkeyPatch.context() as patch:
        no_training(patch)
        compare(several, quiet=True)


@pytest.mark.integration
def test_ctrl_c_reaches_the_runs_and_the_command_goes_on(tmp_path: Path) -> None:
    """Stopped while two runs train; the same command ends with the result of one that was not."""
    long = plan(tmp_path, "toy-a", "toy-b", budgets=CALLS._replace(nfe=400 * COST), processes=2)

    def press() -> None:
        files = [long.runs / name / "seed0" / "metrics.jsonl" for name in ("toy-a", "toy-b")]
        while not all(file.exists() for file in files):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    with pytest.raises(Interrupted, match="the same command goes on"):
        compare(long, quiet=True)
    for name in ("toy-a", "toy-b"):
        folder = long.runs / name / "seed0"
        assert list((folder / "checkpoints").iterdir())
        assert not (folder / "result.json").exists()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["factorial", "tune"])
def test_cells_and_trials_side_by_side(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rates as cells of a design, and as trials of a search. What was trained two at a time is
    what the command trains alone: it finds all of it finished, and says the same."""
    toy, found = str(write_toy(tmp_path)), []
    axes = {"rate": {"small": ["optimizer.lr=0.01"], "large": ["optimizer.lr=0.2"]}}
    design = {"base": toy, "axes": axes, "set": ["eval.score=red"]}
    (tmp_path / "design.yaml").write_text(yaml.safe_dump(design))
    words = {
        "factorial": ["compare", "--factorial", str(tmp_path / "design.yaml")],
        "tune": ["tune", toy, "--try", "optimizer.lr=0.01,0.2", "--set", "eval.score=red"],
    }[kind]
    out = tmp_path / "out.json"
    words += ["--seeds", "0", "1", "--nfe", "150", "--count", "calls", "--plugin", "toykit"]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(out), "--quiet"]
    for number in ("2", "1"):
        assert main([*words, "--processes", number]) == 0
        found.append(json.loads(out.read_text()))
        no_training(monkeypatch)
    assert found[0] == found[1] and len(list(tmp_path.glob("runs/*/seed*/result.json"))) == 4


@pytest.mark.parametrize(
    ("processes", "changes", "message"),
    [
        (0, {}, "at least 1"),
        (2, {"seconds": 60.0}, "--seconds 0 --count calls"),
        (2, {"counted": "cost"}, "budget: give --count calls"),
    ],
)
def test_budgets_that_others_eat_into_are_refused(
    processes: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        side_by_side.check_processes(processes, CALLS._replace(**changes))


def test_each_process_gets_the_next_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes on two GPUs, numbers or names, and none on a machine without."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert side_by_side.visible_devices() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert side_by_side.visible_devices() == ["GPU-a", "GPU-b"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert side_by_side.visible_devices() == []


def test_errors_of_a_run_can_travel() -> None:
    """What a run raises reaches the main process with its words."""
    error = RewardError("the server is gone")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
