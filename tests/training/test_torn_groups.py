"""A loss that compares the images of a prompt needs all of them in one network call, noised alike.
Whatever a config says that tears such a group is refused before a weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import axes, toy
from trainkit import put, weighed

from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs, needs_of
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import LossInput
from flowrl.training.batches import Minibatch
from flowrl.training.learn import LocalData, _differentiate, _Progress, first_unit, node_table
from flowrl.training.trainer import Trainer

NOISY = "plan={fn: full, steps: 6, noise_scale: 0.5, ode_last: 1}"
DRAWS = "likelihood={fn: reverse}"
JOINS_DRAWS = "joins draws, and likelihood forward trains leaves.*segment={fn: prompt}"
NONE_LEFT = "left none of the 8 decisions"
TORN: dict[str, tuple[str, list[str], str]] = {
    # nothing, or something else, keeps the images of a prompt together
    "no segment": ("dgpo", ["segment=null"], "must be in one network call"),
    "segments of states": ("dgpo", ["segment={fn: siblings}"], JOINS_DRAWS),
    "segments of steps": ("dgpo", [NOISY, "segment={fn: fixed, sizes: [5]}"], JOINS_DRAWS),
    "several steps": ("dgpo", [NOISY, DRAWS], "torn: 8 of its 40 images"),
    # some images are not trained
    "without advantage 0": ("dgpo", ["select={fn: nonzero}"], "nonzero: leaves out images"),
    "best and worst": ("dgpo", ["select={fn: best_of_n, top: 1, bottom: 1}"], NONE_LEFT),
    "at random": ("dgpo", ["select={fn: fraction, share: 0.5}"], NONE_LEFT),
    # a prompt has several places, and each of these its own noise and process
    "knapsack": ("dgpo", ["sampler={fn: knapsack}", "train.prompts=4"], "several places"),
    # one call, but not one noise; with a draw for each step of the grid even the times agree
    "own noise": ("dgpo", ["likelihood.shared=false"], "same time and noise"),
    "own noise at all steps": (
        "dgpo",
        ["likelihood={fn: forward, draws: 5, times: grid, last: 5}"],
        "same time and noise",
    ),
    # the others that compare all images of a prompt
    "CRD": ("crd", ["select={fn: nonzero}"], "crd compares all images"),
    "TRPA": ("dgpo", ["loss={fn: level_preference}", "segment={fn: siblings}"], JOINS_DRAWS),
    "a surrogate": (
        "tdm_r1",
        ["surrogate.alone=0", "segment={fn: siblings}"],
        "joins draws.* generated trains steps",
    ),
    "a pair": ("diffusion_dpo", ["segment={fn: siblings}"], JOINS_DRAWS),
    "a pair's noise": ("diffusion_dpo", ["likelihood.shared=false"], "same time and noise"),
}


@pytest.mark.parametrize("name", TORN)
def test_a_torn_group_is_refused_before_the_model(tmp_path: Path, name: str) -> None:
    """The model of this config cannot be made, so the error is older than it."""
    slug, changes, words = TORN[name]
    given = [*axes(f"shapes/{slug}"), *changes]
    with pytest.raises(ConfigError, match=words):
        Trainer(toy(tmp_path, "model={fn: toykit.unloadable}", *given))


@pytest.mark.parametrize(
    "changes",
    [
        ["train.micro_batch=1"],  # a unit larger than that is a call of its own
        ["train.updates=7"],  # more than prompts: some steps have none
        ["train.parts=2", "train.order=step"],
        ["train.refill=2"],
    ],
)
def test_what_only_deals_out_tears_nothing(tmp_path: Path, changes: list[str]) -> None:
    """Two iterations of DGPO, of two prompts with eight images each."""
    trainer = Trainer(toy(tmp_path, *axes("shapes/dgpo"), *changes))
    assert all(trainer.step()["grad_norm"] > 0 for _ in range(2))


# --------------------------------------------------------------------- what the losses are handed

GROUP_LOSSES: dict[str, tuple[str, list[str]]] = {
    "dgpo": ("dgpo", []),
    "crd": ("crd", []),
    "level_preference": ("dgpo", ["loss={fn: level_preference}"]),
}


def watched(folder: Path, name: str, *changes: str) -> tuple[Trainer, list[tuple[Any, Tensor]]]:
    """Make a trainer with a group loss -> it, and the list of what the loss is handed and says."""
    slug, more = GROUP_LOSSES[name]
    trainer = Trainer(toy(folder, *axes(f"shapes/{slug}"), *more, *changes))
    loss, seen = trainer.method.loss, list[tuple[Any, Tensor]]()

    @needs(*needs_of(loss))
    def spied(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        said, metrics = loss(data)
        seen.append((data, said.detach()))
        return said, metrics

    put(trainer, method=replace(trainer.method, loss=spied))
    return trainer, seen


@pytest.mark.parametrize("name", GROUP_LOSSES)
def test_an_idle_call_has_a_whole_group(tmp_path: Path, name: str) -> None:
    """A process without a call of its own, beside one with two: it calls the network twice for all
    nodes of its first prompt, and adds 0 to the gradient."""
    trainer, seen = watched(tmp_path, name)
    found = weighed(trainer)
    ro, advantage = found.ro, found.weight
    if "old" in trainer.method.snapshots and "old" not in trainer.method.copies:
        trainer.weights.snapshot("old")
    streams, table = NodeStreams(ro.tree.group, "idle"), node_table(trainer, ro, advantage)
    put(trainer, sharded=True, world=SimpleNamespace(gather=lambda calls: [calls, 2]))
    nothing = Minibatch(ro.leaf[:0], ro.leaf[:0])
    data = LocalData(ro, table, streams, tuple(trainer.rows()))
    assert _differentiate(trainer, data, nothing, 8, 0, _Progress(trainer, 0)) == []
    first = first_unit(trainer, ro, table).node
    assert [sorted(set(handed.batch.node.tolist())) for handed, _ in seen] == [first.tolist()] * 2
    assert len(first) == int(table.facts["siblings"][first[0]])
    grads = [p.grad for p in trainer.params.values() if p.grad is not None]
    assert grads and not any(bool(grad.any()) for grad in grads)


def test_an_idle_call_where_a_selection_took_all(tmp_path: Path) -> None:
    """It has the whole unit of the first node all the same."""
    trainer, _ = watched(tmp_path, "crd")
    found = weighed(trainer)
    ro, advantage = found.ro, found.weight
    table = node_table(trainer, ro, advantage)
    want = first_unit(trainer, ro, table)
    put(trainer, method=replace(trainer.method, select=[lambda data: data.advantage]))
    table = table._replace(factor=torch.zeros_like(table.factor))
    assert first_unit(trainer, ro, table).node.tolist() == want.node.tolist()


@pytest.mark.parametrize("name", GROUP_LOSSES)
def test_a_loss_knows_which_images_were_not_scored(tmp_path: Path, name: str) -> None:
    """Two of eight images of a prompt without a score, in a run: the loss of their rows is 0."""
    faulty = ("rewards.red={fn: toykit.faulty, value: nan, count: 2}", "train.max_unscored=0.25")
    trainer, seen = watched(tmp_path, name, *faulty)
    assert trainer.step()["grad_norm"] > 0
    lost = sum(int((~handed.scored).sum()) for handed, _ in seen)
    rows = sum(len(handed.scored) for handed, _ in seen)
    assert lost * 8 == rows  # two of all sixteen
    for handed, said in seen:
        away = ~handed.scored
        assert not handed.batch.advantage[away].any() and not said[away].any()
