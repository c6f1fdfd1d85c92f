"""DRM's advantage: the children of one state are compared by the score that each has itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rolloutkit import run
from toykit import axes, toy
from toyscale import SETTING, TOY_SCALE

from flowrl.algorithms.credit.advantages import sibling_norm
from flowrl.algorithms.credit.comparisons import candidate_norm
from flowrl.algorithms.nodes import decision_nodes, leaf_sigmas
from flowrl.algorithms.plans.trees import candidates
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree
from flowrl.training.collect import collect
from flowrl.training.trainer import Trainer

HALF, ALL = 1 / math.sqrt(2), math.sqrt(2)
# a root 0 with the candidates 1, 2, 3; of the first, which goes on, 4, 5, 6; of node 4 the end
PARENT = [-1, 0, 0, 0, 1, 1, 1]
ESTIMATES = [7, 8, 9, 10, 11, 12]  # the leaf below each candidate; 13 is the finished image
TREE = Tree(
    torch.tensor([*PARENT, 1, 2, 3, 4, 5, 6, 4]),
    torch.tensor([0, 1, 1, 1, 2, 2, 2, *[3] * 7]),
    torch.tensor([0.0, *[0.5] * 3, *[0.2] * 3, *[0.0] * 7]),
    torch.zeros(14).long(),
)
LEAF = torch.tensor([*ESTIMATES, 13])


def test_by_hand_on_two_states_of_three_candidates() -> None:
    """Scores 0, 3, 0 have mean 1 and std sqrt 2; 5, 5, 8 mean 6 and the same std. The finished
    image and all that is below the first candidate change nothing, where `sibling_norm` would give
    it the mean 23.6 of (0 + 5 + 5 + 8 + 100) / 5 and so the best place."""
    score = torch.tensor([0.0, 3, 0, 5, 5, 8, 100])
    wanted = [0, -HALF, ALL, -HALF, -HALF, -HALF, ALL, *[0] * 7]
    found = candidate_norm(score, LEAF, TREE, eps=0.0)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(wanted)
    # n - 1: the std is sqrt 3; with eps = sqrt 2 all is half as large
    by_three = candidate_norm(score, LEAF, TREE, eps=0.0, ddof=1)
    assert float(by_three[2]) == pytest.approx(2 / math.sqrt(3))
    damped = candidate_norm(score, LEAF, TREE, eps=ALL)
    assert damped.tolist() == pytest.approx([one / 2 for one in wanted])
    assert float(sibling_norm(score, LEAF, TREE, eps=0.0)[1]) == pytest.approx(ALL, abs=0.1)


def test_what_was_not_scored_and_what_is_alike_has_none() -> None:
    """NaN of the first state: the other two have mean 1 and std 1. All alike: exactly 0."""
    score = torch.tensor([math.nan, 0, 2, 0.1, 0.1, 0.1, 4])
    found = candidate_norm(score, LEAF, TREE, eps=0.0)
    assert found.tolist() == [0, 0, -1, 1, *[0] * 10]


def test_on_a_rollout_only_siblings_count() -> None:
    """Two prompts of two images: whatever the finished images score, candidates have mean 0 among
    siblings, and single draws before the first comparison, trunks and leaves nothing."""
    plan = candidates(0, steps=5, noise_scale=0.5, branch=3, first=1)
    ro = run(plan, cps, prompts=["a", "b"])
    tree, drawn = ro.tree, decision_nodes(ro)
    score = torch.randn(len(ro.leaf), generator=torch.Generator().manual_seed(0))
    found = candidate_norm(score, ro.leaf, tree)
    finished = leaf_sigmas(ro, plan.tail) == 0
    assert int(finished.sum()) == 4
    again = candidate_norm(torch.where(finished, score + 50, score), ro.leaf, tree)
    assert torch.equal(found, again)
    only = drawn[tree.step[drawn] == 1]
    compared = drawn[tree.step[drawn] > 1]
    assert float(found[only].abs().sum()) == 0 and bool((found[compared] != 0).all())
    assert int((found != 0).sum()) == len(compared) == 4 * 3 * 3
    for state in tree.parent[compared].unique():
        assert float(found[tree.parent == state].sum()) == pytest.approx(0, abs=1e-5)
    with pytest.raises(ConfigError, match="eps >= 0"):
        candidate_norm(score, ro.leaf, tree, eps=-1.0)
    chain = run(candidates(0, steps=5, noise_scale=0.5, branch=2, first=1), cps)
    lonely = chain.leaf[leaf_sigmas(chain, torch.zeros(5).long()) == 0][-6:]
    with pytest.raises(ConfigError, match="candidate_norm: no state has several.*candidates"):
        candidate_norm(torch.zeros(6), lonely, chain.tree)


def test_a_run_learns_from_what_the_judge_says_of_each_state(tmp_path: Path) -> None:
    """A judge of latents that scores the noisy states themselves: the advantages that a run trains
    on are those of the state below each leaf, worked out from its latents here."""
    judge = "rewards={red: {fn: toykit.of_states}, strict: {fn: toykit.reddish, weight: 0}}"
    changes = [*SETTING, *axes("shapes/drm"), judge, "credit.eps=0", "eval.score=strict"]
    trainer = Trainer(toy(tmp_path, *changes))
    found = collect(trainer, trainer.rows())
    ro = found.rollout
    sigma = found.batch.sigma
    assert int((sigma > 0).sum()) * 13 == 12 * len(ro.leaf)
    advantage, _ = trainer.reward_set.advantages(
        found.values, found.batch, ro.leaf, ro.tree, trainer.method.credit
    )
    drawn = decision_nodes(ro)
    assert len(drawn) * 13 == 12 * len(ro.leaf)
    value = ro.x[drawn].flatten(1).mean(1).double()
    for state in ro.tree.parent[drawn].unique():
        mine = value[ro.tree.parent[drawn] == state]
        wanted = (mine - mine.mean()) / mine.std(correction=0)
        got = advantage[drawn[ro.tree.parent[drawn] == state]].double()
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_a_reward_of_finished_images_is_refused(tmp_path: Path) -> None:
    """Before anything is sampled; with finished candidates any reward may compare them."""
    changes = [*SETTING, *axes("shapes/drm")]
    with pytest.raises(ConfigError, match="judges every image as a finished one"):
        Trainer(toy(tmp_path, *changes))
    metrics = Trainer(toy(tmp_path, *changes, *TOY_SCALE["shapes/drm"])).step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["grad_norm"] > 0
