"""Credits on forests that are small enough for a pencil, and the fixtures of the published code;
what DDPO remembers of a prompt."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from forests import by_hand, chain, comb, edges, rake, rewards, tree
from groupkit import batch, drawn, images, visit
from rolloutkit import run
from toykit import axes, toy
from toyscale import SETTING, TOY_SCALE
from trainkit import halves, trainer_for

from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.credit.baselines import history_norm
from flowrl.algorithms.credit.comparisons import (
    best_of,
    candidate_norm,
    candidate_pairs,
    reward_softmax,
)
from flowrl.algorithms.credit.single_draws import (
    _step_rewards,
    granular_norm,
    value_anchored,
)
from flowrl.algorithms.forest import (
    decision_nodes,
    leaf_sigmas,
    normalize_by,
    subtree_mean,
    subtree_softmax,
)
from flowrl.algorithms.plans.trees import candidates
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.types import Tree
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

NAN = math.nan
H = math.sqrt(0.5)
REWARD = [0.2, 0.9, 0.5, 0.5, 0.8, 0.1, 0.5, 0.5, 0.5, 0.7, 0.5, 0.5]


# ----------------------------------------------------------------------- groups, depths, siblings

GLOBAL = [-1.417928, 1.890571, 0, 0, 1.417928, -1.890571, *[-0.157548] * 3, 0.787738]


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # reference fixtures, numpy float64; eps 1e-4 for ddof 0 as in Flow-GRPO
        ({"std": "global"}, [*GLOBAL, -0.157548, -0.157548]),
        ({"std": "group"}, [-1.038871, 1.385161, 0, 0, 1.038871, -1.385161]),
        ({"std": "group", "ddof": 1}, [-0.948383, 1.264511, 0, 0, 0.948383, -1.264511]),
    ],
)
def test_group_norm_fixtures(options: dict[str, Any], expected: list[float]) -> None:
    """Two prompts of six images; every decision of a chain has its image's advantage."""
    nodes, leaf = chain(2, 6, 3)
    weight = group_norm(torch.tensor(REWARD), leaf, nodes, **options)
    assert weight[leaf][: len(expected)].tolist() == pytest.approx(expected, abs=2e-6)
    assert torch.equal(weight.reshape(4, 12), weight[leaf].expand(4, 12))


def test_unscored_images_are_left_out() -> None:
    """The fixture's numbers with a NaN among them; one image alone has no baseline."""
    nodes, leaf = chain(2, 7, 2)
    reward = torch.tensor([*REWARD[:3], NAN, *REWARD[3:6], *[NAN] * 7])
    expected = [-1.038871, 1.385161, 0, 0, 0, 1.038871, -1.385161, *[0] * 7]
    weight = group_norm(reward, leaf, nodes)[leaf]
    assert weight.tolist() == pytest.approx(expected, abs=2e-6)
    one, alone = chain(1, 1, 3)
    assert group_norm(torch.tensor([5.0]), alone, one, ddof=1).tolist() == [0] * 4


def test_normalisation_by_hand() -> None:
    """[0, 1]: mean .5, ddof-0 std .5 -> .5 / (.5 + eps); a constant changes nothing, in float64."""
    got = normalize_by(torch.tensor([0.0, 1.0]), torch.zeros(2), eps=0.5)
    assert got.tolist() == pytest.approx([-0.5, 0.5])
    reward, key = torch.tensor([1.0, 2.0, 4.0, 5.0]), torch.zeros(4)
    assert torch.equal(normalize_by(reward, key), normalize_by(reward + 4096, key))


def test_a_node_without_leaves_has_no_value_and_no_advantage() -> None:
    nodes, leaf, value = by_hand([-1, 0, 0], [0, 1, 1]), torch.tensor([1]), torch.tensor([2.0])
    assert subtree_mean(value, leaf, nodes).tolist() == pytest.approx([2, 2, NAN], nan_ok=True)
    assert group_norm(value, leaf, nodes).tolist() == [0, 0, 0]


TREE = tree(1, 1, 2, [0, 1])  # a root, two children, two leaves each
PREVIEW = by_hand([-1, 0, 0, 1, 2, 1], [0, 1, 1, 2, 2, 2], [0.0, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    ("credit", "forest", "reward", "expected"),
    [  # eps 0; two nodes of ddof 1 always get 1/sqrt(2), of ddof 0 always 1
        (depth_norm, TREE, [1.0, 2, 3, 6], {0: 0, 1: -H, 2: H}),
        (sibling_norm, TREE, [1.0, 2, 3, 6], dict(enumerate([0, -H, H, -H, H, -H, H]))),
        # a preview at the depth of the last decisions does not enter their mean
        (depth_norm, (PREVIEW, torch.tensor([3, 4, 5])), [1.0, 3, 100], {3: -H, 4: H}),
        # a trunk is no sibling of the draws beside it: nodes 4 and 5 are the trunk's own draws
        (sibling_norm, rake(1, 1, 4, 2, high=2), [0.0, 1, 5, 5], {1: -H, 2: H, 6: 0, 7: 0}),
        # two strides agree, and do not, whatever the gap
        (granular_norm, rake(1, 1, 4, 2, high=1, strides=(1, 2)), [1.0, 3, 0, 50], {1: -2 * H}),
        (granular_norm, rake(1, 1, 4, 2, high=1, strides=(1, 2)), [1.0, 3, 50, 0], {1: 0, 2: 0}),
    ],
)
def test_small_forests(credit: Any, forest: Any, reward: list[float], expected: Any) -> None:
    weight = credit(torch.tensor(reward), forest[1], forest[0], ddof=1, eps=0)
    assert {v: float(weight[v]) for v in expected} == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------------------------- softmax fusion


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 3 / 4), (0.5, 9 / 10)])
def test_softmax_by_hand(temperature: float, expected: float) -> None:
    """Two children worth 0 and 1 with probabilities 1 : 3; temperature 1/2 squares them."""
    nodes, leaf = tree(1, 1, 1, [0])
    log_prob = torch.tensor([0.0, 0.0, math.log(3)])
    got = subtree_softmax(torch.tensor([0.0, 1.0]), leaf, nodes, log_prob, temperature)
    assert float(got[0]) == pytest.approx(expected, abs=1e-6)


def test_the_limits_of_softmax_fusion() -> None:
    """Equally many leaves below each child: hot is the mean of leaves, cold the likeliest way; only
    differences of log-probs count, where exp alone would be inf or 0; those of 2025 x 64 dimensions
    differ by 1/sqrt(2 D) = 0.002, so that both fusions nearly agree."""
    nodes, leaf = tree(1, 2, 4, [0, 2])
    reward, log_prob = rewards(len(leaf), 3), edges(nodes, 3).double()
    mean = subtree_mean(reward, leaf, nodes)
    hot = subtree_softmax(reward, leaf, nodes, log_prob, 1e12)
    torch.testing.assert_close(hot, mean, rtol=0, atol=1e-10)
    at = 0
    while at not in leaf:
        below = (nodes.parent == at).nonzero().flatten()
        at = int(below[log_prob[below].argmax()])
    cold = subtree_softmax(reward, leaf, nodes, log_prob, 1e-300)
    assert float(cold[0]) == float(reward[leaf.tolist().index(at)])
    expected = subtree_softmax(reward, leaf, nodes, log_prob, 1.0)
    for shift in (1000.0, -1000.0):
        shifted = subtree_softmax(reward, leaf, nodes, log_prob + shift, 1.0)
        torch.testing.assert_close(shifted, expected)
    noise = edges(nodes, 0) / 3 / math.sqrt(2 * 2025 * 64)
    gap = subtree_softmax(reward, leaf, nodes, noise - 0.7, 1.0) - mean
    assert 0 < float(gap.abs().max()) < 0.01


# --------------------------------------------------------------------------------- turning points


@pytest.mark.parametrize(
    ("path", "strict", "loose"),
    [  # R_0 .. R_w; worth of each draw under strict, and by definition 4.1
        ([0.0, -1, 1, 2], [-1, 3, 1], [-1, 3, 1]),  # the reference's: t = 2 counts R_w - R_1
        ([0.0, -1, 3, 2], [-1, 4, -1], [-1, 3, -1]),  # the rest goes back: none if strict
        ([0.0, -1, 2], [-1, 3], [-1, 3]),  # t = w: both its rewards are the same
        ([0.0, 1, 3], [3, 2], [3, 2]),  # t = 1 needs no turn, but that the rest goes on
        ([0.0, -1, -3], [-3, -2], [-3, -2]),
        ([0.0, 2, 1], [2, -1], [2, -1]),
        ([0.0, 1, 1], [1, 0], [1, 0]),  # sign(0) = 0 stops every rule
        ([0.0, 0, 1, 2], [0, 1, 1], [0, 1, 1]),
        ([0.0, 1, -1, 0], [1, -2, 1], [1, -2, 1]),
    ],
)
def test_what_a_draw_is_worth(path: list[float], strict: list[float], loose: list[float]) -> None:
    for flag, expected in ((True, strict), (False, loose)):
        assert _step_rewards(torch.tensor([path]), flag, False).tolist() == [expected]


UP, DOWN = [[0.0, -1, 1, 2], [0.0, -1, 1, 3], [0.0, -1, 1, 4]], [0.0, 1, -1, -2]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [  # worth of draw 2 of each sample; R_w - R_1 of a turning point that stays, else R_2 - R_1
        ([*UP, DOWN], [2, 2, 5, -3]),  # G = 2, 3, 4 rise, one falls: the largest stays
        (UP, [3, 4, 5]),  # one sign alone: all stay
        ([UP[0], UP[0], DOWN], [3, 2, -3]),  # equal gains in batch order
        # by G = 1.5 with R_w - R_1 = 5.5, not by G = 1 with R_w - R_1 = 10
        ([[0.0, -4, 0.25, 1.5], [0.0, -9, 0.5, 1], [0.0, 9, -0.5, -1.25]], [5.5, 9.5, -10.25]),
    ],
)
def test_balance_keeps_as_many_of_both_signs(
    paths: list[list[float]], expected: list[float]
) -> None:
    worth = _step_rewards(torch.tensor(paths), True, True)
    assert worth[:, 1].tolist() == expected


# --------------------------------------------------------------------------------- value anchored


@pytest.mark.parametrize(
    ("forest", "reward", "options", "expected"),
    [  # R = 1, 2, 4, gamma 1/2, one sample: no z-score, A = k Q^2 / mean Q
        (comb(1, 1, 5, 3, baseline=False), [1.0, 2, 4], {"direction": "future"}, [3.0, 4, 4]),
        (comb(1, 1, 5, 3, baseline=False), [1.0, 2, 4], {"direction": "past"}, [1.0, 2.5, 5.25]),
        # baseline and the x0 preview under the last decision are ignored: R = 1, 3
        (comb(1, 1, 4, 2, preview="x0"), [9.0, 1, 9, 3], {"gamma": 0.0}, [1.0, 3.0]),
    ],
)
def test_discounted_sums(forest: Any, reward: list[float], options: Any, expected: Any) -> None:
    nodes, leaf = forest
    filled = {"gamma": 0.5, "k": 1.0} | options
    got = value_anchored(torch.tensor(reward), leaf, nodes, **filled)[nodes.std > 0]
    assert got.tolist() == pytest.approx([q * q / fmean(expected) for q in expected])


def test_the_anchor() -> None:
    """gamma 0 and equal rewards leave k R on the first 5 steps; nearly equal ones the same, where k
    std Q / (std + eps) would be 100 times less; a chain of zeros has shares of 1."""
    nodes, leaf = comb(2, 3, 8, 7, preview="x0", baseline=False)
    weight = value_anchored(torch.full((len(leaf),), 0.8), leaf, nodes, gamma=0.0, k=0.25)
    expected = torch.where(nodes.step <= 5, 0.25 * 0.8, 0.0)
    torch.testing.assert_close(weight[nodes.std > 0], expected[nodes.std > 0])
    nodes, leaf = comb(1, 2, 3, 1, baseline=False)
    near = value_anchored(torch.tensor([0.5, 0.5 + 1e-6]), leaf, nodes, k=0.2)[nodes.std > 0]
    assert float(near.mean()) == pytest.approx(0.2 * 0.5, rel=1e-3)
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    reward = torch.tensor([0.0, 1, 0, 1])
    got = value_anchored(reward, leaf, nodes, gamma=0.0, k=0.5, eps=0.0)[nodes.std > 0]
    assert got.tolist() == pytest.approx([-1, 1.5, -1, 1.5])


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("credit", "options", "message"),
    [
        (group_norm, {"std": "batch"}, "'batch'"),
        (group_norm, {"eps": -1}, "eps=-1"),
        (depth_norm, {"fusion": "softmax"}, "needs log_prob"),
        (depth_norm, {"fusion": "median"}, '"mean" or "softmax".*\'median\''),
        (depth_norm, {"temperature": 0.0}, "temperature > 0, got 0.0"),
        (depth_norm, {"temperature": -1.0}, "temperature > 0, got -1.0"),
        (depth_norm, {"temperature": NAN}, "temperature > 0, got nan"),
        (value_anchored, {"gamma": 1.1}, "gamma=1.1"),
        (value_anchored, {"gamma": NAN}, "gamma=nan"),
        (value_anchored, {"k": -1.0}, "k=-1.0"),
        (value_anchored, {"anchored_steps": -1}, "anchored_steps=-1"),
        (value_anchored, {"direction": "up"}, "direction='up'"),
        (value_anchored, {}, r"at least 0.*got -0\.5.*transform, \{fn: clip, low: 0\}"),
    ],
)
def test_wrong_options_and_rewards_are_named(credit: Any, options: Any, message: str) -> None:
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    if "temperature" in options:
        options = {"fusion": "softmax", "log_prob": edges(nodes, 0), **options}
    with pytest.raises(ConfigError, match=message):
        credit(torch.tensor([0.1, NAN, -0.5, 0.2]), leaf, nodes, **options)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_a_softmax_of_each_prompt_with_mean_one(temperature: float) -> None:
    """Oracle: torch's softmax of a prompt's rewards, times their number."""
    rewards = [[0.2, 1.7, -3.0], [5.0, 5.0, 4.0]]
    found = torch.tensor(images(reward_softmax, *drawn(rewards), temperature=temperature))
    wanted = 3 * torch.softmax(torch.tensor(rewards) / temperature, 1)
    assert torch.allclose(found, wanted.flatten(), atol=1e-6)


def test_standardized_weights_know_no_scale() -> None:
    """By hand: the rewards 0, 2, 6 and 10 have the variance 59 / 4, and twice the softmax of two
    numbers that lie d apart is 2 / (1 + exp(-d))."""
    found = images(
        reward_softmax, *drawn([[0.0, 2.0], [6.0, 10.0]]), temperature=1.0, standardize=True
    )
    gaps = [2 / math.sqrt(59 / 4), 4 / math.sqrt(59 / 4)]
    better = [2 / (1 + math.exp(-gap)) for gap in gaps]
    wanted = [2 - better[0], better[0], 2 - better[1], better[1]]
    assert found == pytest.approx(wanted, abs=1e-3)
    larger = drawn([[0.0, 2e3], [6e3, 1e4]])
    scaled = images(reward_softmax, *larger, temperature=1.0, standardize=True)
    assert scaled == pytest.approx(found, abs=1e-3)


def test_what_was_not_scored_has_no_weight() -> None:
    """By hand: two equal images of three count one each, the third nothing; of a prompt without
    any score nothing counts."""
    laid = drawn([[1.0, NAN, 1.0], [NAN, NAN, NAN]])
    assert images(reward_softmax, *laid, temperature=1.0) == [1, 0, 1, 0, 0, 0]
    assert images(best_of, *laid, equal=True) == [1, 0, 0, 0, 0, 0]
    assert images(best_of, *laid) == [0] * 6


@pytest.mark.parametrize(
    ("keep", "equal", "wanted"),
    [
        (1, False, [0, 0, 1, 0, 0, 0]),
        (2, False, [0, 1, 1, 0, 0, 0]),
        (1, True, [0, 0, 1, 1, 0, 0]),
        (2, True, [0, 1, 1, 1, 1, 0]),
        (9, True, [1] * 6),
    ],
)
def test_the_best_of_each_prompt(keep: int, equal: bool, wanted: list[int]) -> None:
    """Prompts with rewards 1, 2, 3 and with three equal ones: these have no best, unless asked."""
    laid = drawn([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    assert images(best_of, *laid, keep=keep, equal=equal) == wanted


def test_numbers_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="expected keep >= 1, got 0"):
        best_of(*drawn([[1.0, 2.0]]), keep=0)
    with pytest.raises(ConfigError, match="expected temperature > 0, got 0"):
        reward_softmax(*drawn([[1.0, 2.0]]), temperature=0.0)


HALF, ALL = 1 / math.sqrt(2), math.sqrt(2)


# a root 0 with the candidates 1, 2, 3; of the first, which goes on, 4, 5, 6; of node 4 the end
PARENT = [-1, 0, 0, 0, 1, 1, 1]
ESTIMATES = [7, 8, 9, 10, 11, 12]  # the leaf below each candidate; 13 is the finished image
TREE_DRM = Tree(
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
    found = candidate_norm(score, LEAF, TREE_DRM, eps=0.0)
    assert found.dtype == torch.float32 and found.tolist() == pytest.approx(wanted)
    # n - 1: the std is sqrt 3; with eps = sqrt 2 all is half as large
    by_three = candidate_norm(score, LEAF, TREE_DRM, eps=0.0, ddof=1)
    assert float(by_three[2]) == pytest.approx(2 / math.sqrt(3))
    damped = candidate_norm(score, LEAF, TREE_DRM, eps=ALL)
    assert damped.tolist() == pytest.approx([one / 2 for one in wanted])
    assert float(sibling_norm(score, LEAF, TREE_DRM, eps=0.0)[1]) == pytest.approx(ALL, abs=0.1)


def test_what_was_not_scored_and_what_is_alike_has_none() -> None:
    """NaN of the first state: the other two have mean 1 and std 1. All alike: exactly 0."""
    score = torch.tensor([math.nan, 0, 2, 0.1, 0.1, 0.1, 4])
    found = candidate_norm(score, LEAF, TREE_DRM, eps=0.0)
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


# LPO's table of DDIM's stds for 20 steps (Kwai-Kolors/LPO 9c2e8b8, compare_funcs.py): noise rises
LPO_STD = {0: 0.0206, 1: 0.0406, 5: 0.2836, 10: 0.4293, 15: 0.5576, 19: 0.6444}


def lpo_pairs(scores: list[list[float]]) -> list[list[float]]:
    """Credit of four candidates of each of six states of one chain, the k-th with the k-th std."""
    size, states = len(scores[0]), len(scores)
    parent, std, leaf, step = [-1], [0.0], list[int](), [0]
    above, drawn = 0, list[list[int]]()
    for k, noise in enumerate(LPO_STD.values()):
        first = len(parent)
        drawn.append(list(range(first, first + size)))
        parent += [above] * size + drawn[-1]
        std += [noise] * size + [0.0] * size
        step += [k + 1] * size + [states + 1] * size
        leaf += range(first + size, first + 2 * size)
        above = first
    group = torch.zeros(len(parent)).long()
    tree = Tree(torch.tensor(parent), torch.tensor(step), torch.tensor(std), group)
    flat = torch.tensor([one for row in scores for one in row])
    sign = candidate_pairs(flat, torch.tensor(leaf), tree, least=0.35, noisiest=0.5)
    return [sign[row].tolist() for row in drawn]


def test_the_noisier_a_step_the_surer_a_pair_has_to_be() -> None:
    """LPO's thresholds, executed by the reference at six of its steps: .35, .354809, .413241,
    .448277, .479128, .5. Scores just above each make a pair, just below none; its two examples."""
    known = [0.35, 0.354809, 0.413241, 0.448277, 0.479128, 0.5]
    for more, wanted in ((1e-4, [1, 0, 0, -1]), (-1e-4, [0, 0, 0, 0])):
        gaps = [2 * math.atanh(share + more) for share in known]
        assert lpo_pairs([[gap, 0.1, 0.1, 0.0] for gap in gaps]) == [wanted] * 6
    # (1, .2, .9, -.1) counts at the noisiest step, (.3, .25, .1, 0) at none
    blank = [[0.0] * 4] * 5
    assert lpo_pairs([*blank, [1, 0.2, 0.9, -0.1]])[-1] == [1, 0, 0, -1]
    assert lpo_pairs([[0.3, 0.25, 0.1, 0], *blank])[0] == [0, 0, 0, 0]
    made = run(candidates(0, steps=5, noise_scale=0.5, branch=3, first=1), cps)
    with pytest.raises(ConfigError, match="least <= noisiest"):
        candidate_pairs(torch.zeros(10), made.leaf, made.tree, least=0.5, noisiest=0.3)


def test_ddpo_has_the_published_numbers() -> None:
    """The reference's fixture, made by the published tracker: buffer 32, min_count 4."""
    credit = history_norm(buffer=32, least=4)
    credit.start(["a", "b", "never"])
    first = visit(credit, [1, 2, 3, 5], "aabb")
    assert first == pytest.approx([-1.1832152, -0.5070922, 0.1690307, 1.5212766], abs=2e-6)
    second = visit(credit, [2, 4, 3, 3], "aabb")
    assert second == pytest.approx([-0.2294155, 1.6059087, -0.5773496, -0.5773496], abs=2e-6)


def test_a_full_buffer_has_mean_zero_and_forgets_the_oldest() -> None:
    """The advantages of all that a prompt remembers: mean 0 and std 1, by their definition."""
    credit = history_norm(buffer=4, least=2)
    credit.start(["a"])
    visit(credit, [100.0, -100.0], "aa")
    found = visit(credit, [1.0, 2.0, 3.0, 6.0], "aaaa")
    assert sum(found) == pytest.approx(0, abs=1e-5)
    assert sum(value**2 for value in found) == pytest.approx(4, abs=1e-4)
    assert credit.kept["rewards"].tolist() == [[1.0, 2.0, 3.0, 6.0]]


def test_what_was_not_scored_is_not_remembered() -> None:
    credit = history_norm(buffer=4, least=1)
    credit.start(["a", "b"])
    assert visit(credit, [NAN, 1.0, NAN], "aab") == [0, 0, 0]
    assert credit.kept["rewards"][:, 0].tolist()[0] == 1.0
    assert bool(credit.kept["rewards"][1].isnan().all())


@pytest.mark.parametrize("options", [{"buffer": 4, "least": 5}, {"least": 0}, {"eps": 0.0}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="history_norm"):
        history_norm(**options)


# ---------------------------------------------------------------------------------------- in a run

HISTORY = ("credit={fn: history_norm, buffer: 8, least: 2}", "train.group=1", "train.prompts=4")


def test_a_run_goes_on_with_what_it_remembers(tmp_path: Path) -> None:
    """2 + 2 iterations against 4, to the bit; one image per prompt is enough."""
    metrics = halves(partial(trainer_for, tmp_path, *HISTORY), tmp_path)[2]
    assert metrics[0]["grad_norm"] > 0


def test_another_list_of_prompts_is_refused(tmp_path: Path) -> None:
    """On resume, and in the middle of a run; a reward by itself is no reward of the prompt."""
    config = toy(tmp_path, *HISTORY)
    trainer = Trainer(config)
    trainer.save(tmp_path / "saved")
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(CheckpointError, match="is another list than that which"):
        Trainer(config).load(tmp_path / "saved")
    *rest, _ = batch([1.0], "a")
    with pytest.raises(ConfigError, match="'new' is none of them"):
        trainer.method.credit(*rest, prompts=["new"])
    both = ("aggregate={fn: gdpo}", "rewards.strict.weight=1")
    with pytest.raises(ConfigError, match="take aggregate weighted_sum"):
        Trainer(toy(tmp_path, *HISTORY, *both))
