"""A comparison whose runs train at the same time."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from comparekit import COST, no_training, plan, rehearse_few, scores
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.runs.compare import processes as side_by_side
from flowrl.runs.compare import tune
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.processes import Asked, Ended, RunProcess, _lost
from flowrl.runs.stop import SIGNALS, Interrupted, Stop

CALLS = Budgets(2.5 * COST, 0.0, 2)
TIMES = ("seconds", "load", "environment")


def timeless(result: Any) -> Any:
    """Return a result without what a clock said."""
    if isinstance(result, dict):
        return {key: timeless(value) for key, value in result.items() if key not in TIMES}
    return [timeless(one) for one in result] if isinstance(result, list) else result


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes begin with the libraries imported."""
    monkeypatch.setattr(side_by_side, "get_context", lambda _: warm.CONTEXT)
    rehearse_few(monkeypatch)


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
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


def one_after_the_other(
    runs: Sequence[Asked], processes: int, stop: Stop, ended: Ended, *, quiet: bool
) -> None:
    """Train runs as their processes would."""
    assert processes == 2 and quiet
    for run in runs:
        try:
            run.spend(stop, quiet=quiet)
        except Interrupted:  # a pruner has given it up
            continue
        ended(run)


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_a_run_that_is_killed_and_ctrl_c(tmp_path: Path) -> None:
    """Four runs, two at a time. The process of one is killed: the other goes on, and the third
    begins. At Ctrl-C these two end with a checkpoint, and the fourth never begins."""
    long = CALLS._replace(nfe=4000 * COST)
    what = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1), budgets=long, processes=2)
    order = [what.runs / name / f"seed{seed}" for seed in (0, 1) for name in ("toy-a", "toy-b")]

    def trains(folder: Path) -> bool:
        return (folder / "metrics.jsonl").exists()

    def press() -> None:
        while not all(map(trains, order[:2])):
            time.sleep(0.05)
        os.kill(int((order[0] / ".lock").read_text()), signal.SIGKILL)
        while not trains(order[2]):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(Interrupted, match="the same command goes on"):
        compare(what, quiet=True)
    assert not order[3].exists()
    for folder in order[1:3]:
        newest = max(int(p.name.split("-")[-1]) for p in (folder / "checkpoints").iterdir())
        assert newest == len((folder / "metrics.jsonl").read_text().splitlines())
        assert not (folder / "result.json").exists()


@pytest.mark.integration
def test_what_a_process_says_when_it_fails(tmp_path: Path) -> None:
    """A mistake of the user keeps its kind and words. While it imports, signals do not reach it."""
    run = Asked(str(tmp_path / "none.yaml"), (), (), CALLS, tmp_path / "run")
    one = RunProcess(run, None, 0)
    # the first process of all: what else starts with it lets no signal through
    status = Path(f"/proc/{one.process.pid}/status")
    if status.exists():
        blocked = int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16)
        assert all(blocked >> (number - 1) & 1 for number in SIGNALS)
    while not one.over():
        time.sleep(0.05)
    error = one.result()
    assert isinstance(error, ConfigError) and "none.yaml" in str(error)


def test_what_is_said_of_a_process_that_says_nothing() -> None:
    assert "ended by SIGKILL" in _lost(-9, trains=True)
    assert "fewer --processes" in _lost(-9, trains=True)
    assert _lost(-11, trains=True) == "its process was ended by SIGSEGV"
    assert "signal 35" in _lost(-35, trains=True)
    assert "exit code 1" in _lost(1, trains=False) and "__main__" in _lost(1, trains=False)
    assert "in the middle" in _lost(0, trains=True)


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_trials_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rates as trials of a search. What they ask processes for is what the command trains
    alone: it finds all of it finished, and says the same. The processes are played here, by one
    run after the other in this one."""
    monkeypatch.setattr(tune, "train_side_by_side", one_after_the_other)
    toy, found = str(write_toy(tmp_path)), []
    words = ["tune", toy, "--try", "optimizer.lr=0.01,0.2", "--set", "eval.score=red"]
    out = tmp_path / "out"
    words += ["--seeds", "0", "--nfe", "150", "--plugin", "toykit"]
    words += ["--out", str(out), "--quiet"]
    for number in ("2", "1"):
        assert main([*words, "--processes", number]) == 0
        found.append(json.loads((out / "result.json").read_text()))
        no_training(monkeypatch)
    assert found[0] == found[1] and len(list(out.glob("trials/*/seed*/result.json"))) == 2


@pytest.mark.parametrize(
    ("processes", "changes", "message"),
    [
        (0, {}, "at least 1"),
        (2, {"seconds": 60.0}, "give --seconds 0"),
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


def test_one_of_several_gpus_cannot_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process sees one GPU, so cuda:1 would fail in all of them, after the base was judged."""
    config = str(write_toy(tmp_path))
    named = ("rewards.red.device=cuda:1",)
    runs = [Asked(config, named, ("toykit",), CALLS, tmp_path / "run")]
    monkeypatch.setattr(side_by_side, "load_config", lambda *_: Named())
    monkeypatch.setattr(side_by_side, "check_same_run", lambda *_: None)
    with pytest.raises(
        ConfigError, match="sees one of the 2 GPUs, as cuda:0, but toy names cuda:1"
    ):
        side_by_side._check(runs, ["0", "1"])
    side_by_side._check(runs, ["0"])


class Named:
    """Stands in for a config with a device in it."""

    name = "toy"

    def to_dict(self) -> dict[str, Any]:
        return {"prompt": "a text on cuda:1", "rewards": [{"device": "cuda:1"}]}
