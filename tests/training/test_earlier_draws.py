"""Single-stream forgets by how far the policy has moved: the rule, and what a run measures."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import toy
from trainkit import halves, trainer_for

from flowrl.algorithms.forest import decision_nodes, root_above
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree
from flowrl.techniques.earlier_draws import EarlierDraws
from flowrl.techniques.prompt_histories import forgetting, single_stream
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

# every iteration visits all six prompts
STREAM = (
    "credit={fn: single_stream, half: 0.01}",
    "rewards.red.fn=toykit.warmth",
    "train.group=1",
    "train.prompts=6",
)


@pytest.mark.parametrize(
    ("moved", "keep"),
    [
        # the reference: D = .02 is 2^(-1/3) = .7937, which is below the range
        (0.02, 0.875),
        (0.005, 2 ** (-1 / 12)),
        (0.0, 0.96),
        (float("nan"), 0.875),
    ],
)
def test_how_much_stays(moved: float, keep: float) -> None:
    """The code's numbers: half at .06, within .875 and .96."""
    assert forgetting(moved, 0.06, 0.875, 0.96) == pytest.approx(keep)
    assert forgetting(0.02, 0.06, 0.1, 0.96) == pytest.approx(0.7937, abs=5e-5)


def test_a_visit_forgets_by_what_has_moved() -> None:
    """The reference's fixture: alpha = beta = 4 = N / 2 with N = 1 / (1 - .875), D .02 and reward
    1: 4.5 and 3.5, worth .5625. The second prompt has not moved: .96 x 4 and .96 x 4 + 1."""
    credit = single_stream(half=0.06)
    assert credit.needs == {"prompts", "moved"} and single_stream().needs == {"prompts"}
    credit.start(["a", "b"])
    leaf = torch.arange(2)
    tree = Tree(torch.full((2,), -1), torch.zeros(2, dtype=torch.int64), torch.zeros(2), leaf)
    moved = torch.tensor([0.02, 0.0])
    credit.update(torch.tensor([1.0, 0.0]), leaf, tree, prompts=["a", "b"], moved=moved)
    assert credit.kept["alpha"].flatten().tolist() == pytest.approx([4.5, 3.84])
    assert credit.kept["beta"].flatten().tolist() == pytest.approx([3.5, 4.84])
    alpha, beta = (float(credit.kept[name].flatten()[0]) for name in ("alpha", "beta"))
    assert alpha / (alpha + beta) == pytest.approx(0.5625)


def kept_of(trainer: Trainer) -> dict[int, Any]:
    """Return the draws that a trainer keeps, by row of its prompts."""
    earlier = trainer.parts.get(EarlierDraws)
    assert earlier is not None
    return earlier.kept


def log_probs(trainer: Trainer, made: Any) -> Tensor:
    """Score the draws of a rollout under the weights of now, one image after the other."""
    nodes = decision_nodes(made)
    batch = trainer.method.likelihood.batch(made, torch.zeros(len(made.x)), nodes, None)  # type: ignore[arg-type]
    with torch.no_grad():
        found = trainer.method.likelihood.evaluate(trainer.model, batch, trainer.method.transition)
    return found.log_prob


def test_a_run_measures_the_draws_of_the_last_visit(tmp_path: Path) -> None:
    """By scoring the first iteration's whole rollout again after its updates: the mean absolute
    change over the draws of each prompt, and over prompts. Nothing is known at a first visit."""
    trainer = Trainer(toy(tmp_path, *STREAM))
    rows, made = trainer.rows(), trainer.sample(trainer.rows())
    first = trainer.step()
    assert first["moved"] == 0
    assert sorted(kept_of(trainer)) == list(range(6))
    change = (log_probs(trainer, made) - made.log_prob[decision_nodes(made)]).abs()
    place = made.tree.group[decision_nodes(made)]
    by_place = [float(change[place == p].mean()) for p in range(6)]
    memory: Any = trainer.method.credit
    before = memory.kept["alpha"].clone(), memory.kept["beta"].clone()
    second = trainer.step()
    assert second["moved"] == pytest.approx(sum(by_place) / 6, rel=1e-5) and second["moved"] > 1e-4
    # alpha + beta is what stays of them, and 1
    total = [float((a + b)[row, 0]) for a, b in [before] for row in rows]
    kept = [forgetting(moved, 0.01, 0.875, 0.96) for moved in by_place]
    wanted = [keep * old + 1 for keep, old in zip(kept, total, strict=True)]
    found = [float((memory.kept["alpha"] + memory.kept["beta"])[row, 0]) for row in rows]
    # as near as the changes themselves, which are differences of float32 numbers
    assert found == pytest.approx(wanted, rel=1e-5) and 0.875 < max(kept) < 0.96


def test_of_several_images_the_first_is_kept(tmp_path: Path) -> None:
    """Three draws of the first of two images of each prompt; a tree has all that its root has."""
    for plan, count in ((), 3), (("plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [1]}",), 5):
        trainer = Trainer(toy(tmp_path, *STREAM, "train.group=4", *plan))
        made = trainer.sample(trainer.rows())
        trainer.step()
        nodes = decision_nodes(made)
        mine = nodes[root_above(made)[nodes] == 0]
        kept = kept_of(trainer)[trainer.rows()[0]]
        assert len(mine) == count == len(kept["sigma"])


def test_it_costs_what_was_said_and_a_run_goes_on_with_it(tmp_path: Path) -> None:
    """Three network rows a prompt from the second visit on. 2 + 2 iterations against 4, to the
    bit, with what was kept in the checkpoint."""
    run, _, metrics = halves(partial(trainer_for, tmp_path, *STREAM), tmp_path)
    assert metrics[1]["nfe"] - metrics[0]["nfe"] == 6 * 3 == run.config.train.prompts * 3
    assert check_plan(run.config).calls == metrics[1]["nfe"]
    assert all(math.isfinite(row["moved"]) for row in metrics)


def test_what_cannot_be_measured_is_refused_before_the_model(tmp_path: Path) -> None:
    for changes, words in (
        (["likelihood={fn: forward}"], "likelihood forward trains no draws; leave credit.half out"),
        (["credit.half=0"], "half > 0"),
        (["credit.least=0.99"], "least <= most < 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            Trainer(toy(tmp_path, *STREAM, *changes, "model={fn: toykit.unloadable}"))
