"""Credits on forests that are small enough for a pencil, and the fixtures of the published code."""

from __future__ import annotations

import itertools
import math
from statistics import fmean
from typing import Any

import pytest
import torch
from forests import by_hand, chain, comb, edges, rake, rewards, tree
from hypothesis import given
from hypothesis import strategies as st

from flowrl.algorithms.credit._chains import comb_of
from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.credit.single_draws import (
    _step_rewards,
    granular_norm,
    turning_point,
    value_anchored,
)
from flowrl.algorithms.forest import normalize_by, subtree_mean, subtree_softmax
from flowrl.core.errors import ConfigError

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


@pytest.mark.parametrize("options", [{}, {"ddof": 1, "eps": 1e-8}])
def test_depth_norm_is_group_norm_on_chains(options: Any) -> None:
    nodes, leaf = chain(2, 6, 3)
    one, two = (f(torch.tensor(REWARD), leaf, nodes, **options) for f in (depth_norm, group_norm))
    torch.testing.assert_close(one, two)
    given_edges = depth_norm(torch.tensor(REWARD), leaf, nodes, log_prob=edges(nodes, 0), **options)
    assert torch.equal(one, given_edges)  # the mean reads no log-prob


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


def test_an_ancestor_has_the_mean_advantage_of_its_leaves() -> None:
    """Rewards 0, 0, 0, 4: z = -1/sqrt(3) three times and sqrt(3), so the second child has their
    mean."""
    weight = group_norm(torch.tensor([0.0, 0, 0, 4]), TREE[1], TREE[0], eps=0)
    z = 1 / math.sqrt(3)
    assert weight.tolist() == pytest.approx([0, -z, z, -z, -z, -z, 3 * z], abs=1e-6)


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


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.sampled_from([1, -1]), st.booleans())
def test_increments_telescope_to_the_whole_gain(up: list[int], sign: int, strict: bool) -> None:
    """Where rewards only rise, or fall: draw 1 is paid R_w - R_0, the others together R_w - R_1."""
    path = sign * torch.tensor([[0.0, *itertools.accumulate(up)]])
    got = _step_rewards(path, strict, False)[0]
    assert float(got[0]) == float(path[0, -1])
    assert float(got[1:].sum()) == float(path[0, -1] - path[0, 1])


def test_an_unscored_image_takes_out_what_reads_it_only() -> None:
    """Without R_2 draws 2 and 3 have no d, draw 4 no q before it; without R_0 or R_w all are 0."""
    nodes, leaf = comb(1, 3, 6, 5)
    found = comb_of("t", leaf, nodes, baseline=True)
    for place, out in (
        (found.seen[0, 1], [False, True, True, True, False]),
        (found.start[0], [True] * 5),
        (found.seen[0, -1], [True] * 5),
    ):
        reward = rewards(len(leaf), 7)
        reward[place] = NAN
        weight = turning_point(reward, leaf, nodes)[found.decision]
        assert (weight[0] == 0).tolist() == out and bool((weight[1:] != 0).all())


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


def test_terminal_reward_alone_is_grpo() -> None:
    """k 0, gamma 1, previews worth 0: Q is constant along the chain and w = 1."""
    nodes, leaf = comb(2, 5, 6, 4, baseline=False)
    final = rewards(10, 3)
    reward = torch.cat([torch.zeros(len(leaf) - 10), final])
    weight = value_anchored(reward, leaf, nodes, k=0.0, gamma=1.0)
    plain, plain_leaf = chain(2, 5, 4)
    expected = group_norm(final, plain_leaf, plain)
    torch.testing.assert_close(weight[nodes.std > 0], expected[plain.std > 0])


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
