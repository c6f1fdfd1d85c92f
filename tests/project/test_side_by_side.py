"""The same work in a public trainer and in flowrl: what the watch counts, and what was measured."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from docskit import ROOT
from scriptkit import module_of

from flowrl.config.load import load_config
from flowrl.training.rehearsal import cost_of

watch = module_of("side_by_side", "watch")
trainers = module_of("side_by_side", "trainers")
beside = module_of("side_by_side", "beside")
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
    cost = cost_of(config, 0)
    assert (cost.images, cost.nfe, cost.decisions) == (6, 6 * 5, 6 * 4)
    assert (config.train.micro_batch, config.train.rollout_batch) == (3, 3)
    assert list(config.rewards) == ["jpeg"] and config.kl_beta == kl


# Of the FLUX trainers' default work by hand: images, network calls in sampling with nothing shared
# and as planned, and draws that are trained. 12 images of 16 steps, 9 of 15 draws each; 12 of 25
# with a window of 4; a tree of 1 + 3 (2 + 4 + 8) + 10 x 16 nodes, of which the last 16 are not
# trained but each of the 15 that split twice. Before the first draw the images of a prompt are one.
ON_FLUX = {
    "dance_grpo": (12, 12 * 16, 12 * 16 - 11, 12 * 9),
    "mix_grpo": (12, 12 * 25, 12 * 25 - 11, 12 * 4),
    "branch_grpo": (16, 203, 203, 203 - 16 + 15),
}


@pytest.mark.parametrize("own", [0, 12])
@pytest.mark.parametrize("name", ON_FLUX)
def test_flowrl_is_told_the_work_on_flux(tmp_path: Path, name: str, own: int) -> None:
    for file in ("train.txt", "test.txt"):
        (tmp_path / file).write_text("a circle\na square\n")
    trainer = beside.TRAINERS[name]
    start = trainer.ours(trainer.work, tmp_path, name, own)
    config = load_config(start.program[1], start.program[2:])
    cost = cost_of(config, 0)
    images, apart, planned, trained = ON_FLUX[name]
    assert (cost.images, cost.nfe) == (images, planned if own else apart)
    share = 9 / 15 if name == "dance_grpo" else 1
    assert cost.decisions * share == trained
    assert (config.train.micro_batch, config.train.updates) == (own or 1, trainer.work.updates)
    assert list(config.rewards) == ["jpeg"] and config.train.ema == 0


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_both_did_the_same_work(file: Path) -> None:
    """The rows that went through the network follow from the work, and what was measured came from
    a commit. On equal calls they are equal, but for the edges that BranchGRPO trains of the last
    step and of each child apart; of its own accord flowrl computes what images share once."""
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = {name: trainer["rows"] for name, trainer in found["trainers"].items()}
    theirs, ours, own = (rows[name] for name in (found["trainer"], "flowrl", "flowrl, own batches"))
    if found["trainer"] in ON_FLUX:
        images, apart, planned, trained = ON_FLUX[found["trainer"]]
        split = found["trainer"] == "branch_grpo"
        assert theirs == {"sampling": apart, "training": trained + 16 * split}
        assert ours == {"sampling": apart, "training": trained - 15 * split}
        assert own["sampling"] == planned and own["training"] <= ours["training"]
    else:
        work = found["work"]
        halves = 2 if work["guidance"] > 1 else 1
        images = work["prompts"] * work["group"]
        assert theirs == ours == own
        assert theirs["sampling"] == halves * images * work["steps"]
        assert theirs["training"] == halves * images * (work["steps"] - 1)
    assert "dirty" not in found["environment"]["commit"]


def test_something_was_measured() -> None:
    assert FILES
