"""The same work in a public trainer and in flowrl: what the watch counts, and what was measured."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from docskit import ROOT
from scriptkit import module_of

from flowrl.config.load import load_config
from flowrl.training.rehearsal import cost_of

watch = module_of("bench/side_by_side", "watch")
trainers = module_of("bench/side_by_side", "trainers")
beside = module_of("bench/side_by_side", "beside")
ON_FLUX = ("dance_grpo", "mix_grpo", "branch_grpo")
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


class Rows(NamedTuple):
    """What the network sees of one iteration on FLUX, counted by going through its images."""

    images: int
    sampled: int  # nothing is shared
    planned: int  # images that start from one noise are one until the first draw
    trained: int  # states with a trained draw
    edges: int  # that BranchGRPO's code trains: each child apart, and those of the last step


def rows_on_flux(name: str, work: Any) -> Rows:
    """Count them, for one prompt."""
    n, steps = work.group, work.steps
    if name == "branch_grpo":
        splits = [int(step) for step in work.splits.split(",")]
        live, sampled, trained, edges = 1, 0, 0, 0
        for step in range(steps):
            sampled += live
            trained += live if step < steps - 1 else 0
            live *= 2 if step in splits else 1
            edges += live
        return Rows(live, sampled, sampled, trained, edges)
    trained = int(0.6 * (steps - 1)) if name == "dance_grpo" else work.window
    return Rows(n, n * steps, 1 + n * (steps - 1), n * trained, 0)


def test_rows_on_flux_are_those_of_the_papers_scripts() -> None:
    """DanceGRPO: 12 images, 16 steps, 9 of 15 draws. MixGRPO: 25 steps, 4 trained. BranchGRPO's
    script trains 218 edges of a tree, as its page says, from 1 + 3 (2 + 4 + 8) + 10 x 16 nodes."""
    found = {name: rows_on_flux(name, beside.TRAINERS[name].work) for name in ON_FLUX}
    assert found["dance_grpo"] == (12, 192, 181, 108, 0)
    assert found["mix_grpo"] == (12, 300, 289, 48, 0)
    assert found["branch_grpo"] == (16, 203, 203, 187, 218)


@pytest.mark.parametrize("own", [0, 12])
@pytest.mark.parametrize("name", ON_FLUX)
def test_flowrl_is_told_the_work_on_flux(tmp_path: Path, name: str, own: int) -> None:
    for file in ("train.txt", "test.txt"):
        (tmp_path / file).write_text("a circle\na square\n")
    trainer = beside.TRAINERS[name]
    start = trainer.ours(trainer.work, tmp_path, name, own)
    config = load_config(start.program[1], start.program[2:])
    cost = cost_of(config, 0)
    rows = rows_on_flux(name, trainer.work)
    assert (cost.images, cost.nfe) == (rows.images, rows.planned if own else rows.sampled)
    last = trainer.work.group if name == "branch_grpo" else 0
    assert cost.decisions * (9 / 15 if name == "dance_grpo" else 1) == (
        rows.edges - last or rows.trained
    )
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
        work = trainers.Work(**found["work"])
        want = rows_on_flux(found["trainer"], work)
        assert theirs == {"sampling": want.sampled, "training": want.edges or want.trained}
        assert ours == {"sampling": want.sampled, "training": want.trained}
        assert own["sampling"] == want.planned and own["training"] <= want.trained
    else:
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
