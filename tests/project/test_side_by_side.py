"""The same work in a public trainer and in flowrl: what the watch counts, and what was measured."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from docskit import ROOT
from scriptkit import module_of

from flowrl.config.load import load_config
from flowrl.training.rehearsal import check_plan

watch = module_of("bench/side_by_side", "watch")
trainers = module_of("bench/side_by_side", "trainers")
FILES = sorted((ROOT / "assets" / "results").glob("side-by-side-*.json"))


def test_seconds_go_to_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by one second each time that it is read: each phase has one second each
    time that it ends. In this iteration sampling ends before each of two decodes and before
    training, decoding twice; the first iteration does not count."""
    clock = count()
    monkeypatch.setattr(watch, "now", lambda: next(clock))
    monkeypatch.setattr(watch, "forget_peak", lambda: None)
    seen = watch.Watch(updates=2, warm_up=1, iterations=1)

    def iteration() -> None:
        for _ in range(2):
            seen.called(6, gradient=False)
            seen.called(6, gradient=False)
            seen.decoding(lambda: None)
        for _ in range(2):
            seen.called(4, gradient=True)
            seen.called(4, gradient=False)  # the reference
            seen.stepped()

    iteration()
    with pytest.raises(watch.Done):
        iteration()
    (row,) = seen.rows
    seconds = {"between": 1, "sampling": 3, "decoding": 2, "training": 1, "all": 7}
    assert row["seconds"] == seconds
    assert row["calls"] == {"sampling": 4, "training": 2, "reference": 2}
    assert row["rows"] == {"sampling": 24, "training": 8, "reference": 8}


@pytest.mark.parametrize("kl", [0.0, 0.01])
def test_flowrl_is_told_the_work(tmp_path: Path, kl: float) -> None:
    """Images, and draws that are trained, by hand: all steps have noise and the last is not
    trained."""
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text("a circle\na square\n")
    work = trainers.Work("assets/shapes-sd3", 2, 3, 5, 64, 4.5, kl, 3, "float32")
    start = trainers.flowrl(work, tmp_path, "flow_grpo")
    config = load_config(start.program[1], start.program[2:])
    cost = check_plan(config).work
    assert (cost.images, cost.nfe, cost.decisions) == (6, 6 * 5, 6 * 4)
    assert (config.train.micro_batch, config.train.rollout_batch) == (3, 3)
    assert list(config.rewards) == ["jpeg"] and config.kl_beta == kl


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_both_did_the_same_work(file: Path) -> None:
    """The rows that went through the network follow from the work, and what was measured came from
    a commit."""
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = {name: trainer["rows"] for name, trainer in found["trainers"].items()}
    theirs, ours, own = (rows[name] for name in (found["trainer"], "flowrl", "flowrl, own batches"))
    work = found["work"]
    halves = 2 if work["guidance"] > 1 else 1
    images = work["prompts"] * work["group"]
    assert theirs == ours == own
    # called alike to sample and to train, so that the watch cannot tell them apart
    compiled = rows.get("flowrl, own batches, compiled", theirs)
    assert sum(compiled.values()) == sum(theirs.values())
    assert theirs["sampling"] == halves * images * work["steps"]
    assert theirs["training"] == halves * images * (work["steps"] - 1)
    assert "dirty" not in found["environment"]["commit"]


def test_something_was_measured() -> None:
    assert FILES
