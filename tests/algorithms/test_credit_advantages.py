"""BranchGRPO's two fusions and its normalisation by depth."""

from __future__ import annotations

import math

import pytest
import torch
from forests import Forest, comb, random_forest, reordered, rewards, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.forest import normalize_by, subtree_mean, subtree_softmax
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree

NAN = float("nan")
SEED = st.integers(0, 10**6)


def edges(nodes: Tree, seed: int) -> Tensor:
    """Draw log-probs; 0 on edges without noise, as in a rollout."""
    drawn = 3 * torch.randn(len(nodes.std), generator=torch.Generator().manual_seed(seed))
    return torch.where(nodes.std > 0, drawn, 0.0)


def slow(
    v: int, nodes: Tree, worth: dict[int, float], log_prob: Tensor, temperature: float
) -> float:
    """Fuse one node by recursion over its children."""
    if v in worth:
        return worth[v]
    below = [
        (u, slow(u, nodes, worth, log_prob, temperature))
        for u in range(v, len(nodes.parent))
        if nodes.parent[u] == v
    ]
    scored = [
        (math.exp(float(log_prob[u]) / temperature), value)
        for u, value in below
        if not math.isnan(value)
    ]
    return sum(p * value for p, value in scored) / sum(p for p, _ in scored) if scored else math.nan


@given(random_forest(), SEED, st.sampled_from([0.0, 0.3]), st.sampled_from([0.5, 1.0, 7.0]))
@settings(max_examples=150, deadline=None)
def test_softmax_fusion_is_the_recursion(
    forest: Forest, seed: int, missing: float, temperature: float
) -> None:
    """Oracle: recursion in Python, unscored children left out."""
    nodes, leaf = forest
    reward, log_prob = rewards(len(leaf), seed, missing=missing), edges(nodes, seed)
    got = subtree_softmax(reward, leaf, nodes, log_prob, temperature).tolist()
    worth = dict(zip(leaf.tolist(), reward.tolist(), strict=True))
    expected = [slow(v, nodes, worth, log_prob, temperature) for v in range(len(nodes.std))]
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)


@given(random_forest(), SEED)
@settings(max_examples=40, deadline=None)
def test_equal_rewards_of_a_prompt_give_exactly_no_weight(forest: Forest, seed: int) -> None:
    """Each prompt has its own value; no rounding of the shares may show, even with eps 0."""
    nodes, leaf = forest
    value = torch.tensor([0.1, 26.73, 1 / 3])[nodes.group[leaf]]
    got = depth_norm(
        value, leaf, nodes, fusion="softmax", temperature=0.3, log_prob=edges(nodes, seed), eps=0
    )
    assert torch.equal(got, torch.zeros(len(nodes.std)))


@given(random_forest(), SEED)
@settings(max_examples=40, deadline=None)
def test_order_of_samples_and_leaves_does_not_matter(forest: Forest, seed: int) -> None:
    nodes, leaf = forest
    reward, log_prob = rewards(len(leaf), seed, missing=0.1), edges(nodes, seed)
    (moved, moved_leaf), new, place = reordered(forest, seed)
    shuffled = torch.empty_like(log_prob)
    shuffled[new] = log_prob
    for fusion in ("mean", "softmax"):
        one = depth_norm(reward, leaf, nodes, fusion=fusion, log_prob=log_prob)  # type: ignore[arg-type]
        two = depth_norm(reward[place], moved_leaf, moved, fusion=fusion, log_prob=shuffled)  # type: ignore[arg-type]
        torch.testing.assert_close(two[new], one, rtol=1e-5, atol=1e-6)


@given(random_forest(), SEED, st.integers(0, 1))
@settings(max_examples=100, deadline=None)
def test_weights_of_what_is_compared_sum_to_zero(forest: Forest, seed: int, ddof: int) -> None:
    """Draws of one prompt and depth, or of one state: mean 0, and with eps 0 the std is 1 or all
    are 0."""
    nodes, leaf = forest
    reward = rewards(len(leaf), seed)
    for norm, family in ((depth_norm, nodes.step), (sibling_norm, nodes.parent)):
        weight = norm(reward, leaf, nodes, ddof=ddof, eps=0)
        keys = torch.stack([nodes.group, family, (nodes.std > 0).long()])
        for row in torch.unique(keys, dim=1).T:
            mine = weight[(keys == row[:, None]).all(0)].double()
            assert float(mine.sum()) == pytest.approx(0, abs=1e-5)
            spread = float(mine.std(correction=ddof)) if len(mine) > ddof else 0.0
            assert spread == pytest.approx(1, abs=1e-4) or mine.tolist() == [0] * len(mine)


@given(random_forest(), SEED)
@settings(max_examples=40, deadline=None)
def test_the_mean_is_what_it_was(forest: Forest, seed: int) -> None:
    """The formula of before, to the bit, whatever log-probs are handed over."""
    nodes, leaf = forest
    reward = rewards(len(leaf), seed, missing=0.1)
    value = subtree_mean(reward, leaf, nodes)
    before = (
        normalize_by(value, nodes.group, nodes.step, nodes.std > 0, eps=1e-4, ddof=0)
        .nan_to_num()
        .float()
    )
    assert torch.equal(depth_norm(reward, leaf, nodes), before)
    assert torch.equal(depth_norm(reward, leaf, nodes, log_prob=edges(nodes, seed)), before)


def test_root_has_the_mean_of_its_leaves_and_every_depth_is_standard() -> None:
    """BranchGRPO's own tree: 16 leaves, 218 edges; per depth mean 0 and ddof-1 std 1; two nodes
    give 1/sqrt(2)."""
    nodes, leaf = tree(1, 1, 20, [0, 3, 6, 9])
    reward = rewards(16, 0)
    assert (len(leaf), len(nodes.parent) - 1) == (16, 218)
    assert float(subtree_mean(reward, leaf, nodes)[0]) == pytest.approx(
        float(reward.double().mean()), abs=1e-15
    )
    for fusion in ("mean", "softmax"):
        weight = depth_norm(
            reward, leaf, nodes, fusion=fusion, log_prob=edges(nodes, 1), ddof=1, eps=0
        )  # type: ignore[arg-type]
        for step in range(1, 21):
            here = weight[nodes.step == step]
            assert float(here.mean()) == pytest.approx(0, abs=1e-6) and float(
                here.std()
            ) == pytest.approx(1, abs=1e-5)
        assert weight[nodes.step == 1].abs().tolist() == pytest.approx(
            [math.sqrt(0.5)] * 2, abs=1e-6
        )


def test_softmax_by_hand() -> None:
    """Two children worth 0 and 1 with probabilities 1 : 3 -> 3/4; temperature 1/2 squares them ->
    9/10."""
    nodes = Tree(
        torch.tensor([-1, 0, 0]),
        torch.tensor([0, 1, 1]),
        torch.tensor([0.0, 1, 1]),
        torch.zeros(3).long(),
    )
    leaf, log_prob = torch.tensor([1, 2]), torch.tensor([0.0, 0.0, math.log(3)])
    for temperature, expected in ((1.0, 3 / 4), (0.5, 9 / 10)):
        got = subtree_softmax(torch.tensor([0.0, 1.0]), leaf, nodes, log_prob, temperature)
        assert float(got[0]) == pytest.approx(expected, abs=1e-6)


def test_large_temperature_is_the_mean_of_children_and_a_small_one_the_likeliest() -> None:
    """In a tree whose nodes have equally many leaves the mean of children is the mean of leaves."""
    nodes, leaf = tree(1, 2, 4, [0, 2])
    reward, log_prob = rewards(len(leaf), 3), edges(nodes, 3)
    flat = subtree_softmax(reward, leaf, nodes, log_prob, 1e12)
    torch.testing.assert_close(flat, subtree_mean(reward, leaf, nodes), rtol=0, atol=1e-10)
    sharp = subtree_softmax(reward, leaf, nodes, log_prob, 1e-300)
    at = 0
    while at not in leaf:
        at = max(
            (v for v in range(len(nodes.parent)) if nodes.parent[v] == at),
            key=lambda v: float(log_prob[v]),
        )
    assert float(sharp[0]) == float(reward[leaf.tolist().index(at)])


def test_log_probs_of_any_size_are_stable() -> None:
    """Only differences count: the same weights 1000 higher or lower, where exp alone would be inf
    or 0."""
    nodes, leaf = tree(1, 1, 3, [0, 1])
    reward, log_prob = rewards(len(leaf), 1), edges(nodes, 1).double()
    expected = subtree_softmax(reward, leaf, nodes, log_prob, 1.0)
    for shift in (1000.0, -1000.0):
        torch.testing.assert_close(
            subtree_softmax(reward, leaf, nodes, log_prob + shift, 1.0), expected
        )


def test_mean_over_dims_log_probs_are_nearly_uniform() -> None:
    """2025 x 64 dimensions of standard normal noise: log-probs spread by 1/sqrt(2 D) = 0.002, so
    both fusions agree."""
    nodes, leaf = tree(1, 1, 4, [0, 1, 2])
    noise = torch.randn(len(nodes.std), generator=torch.Generator().manual_seed(0)) / math.sqrt(
        2 * 2025 * 64
    )
    reward = rewards(len(leaf), 2)
    gap = subtree_softmax(reward, leaf, nodes, noise - 0.7, 1.0) - subtree_mean(reward, leaf, nodes)
    assert 0 < float(gap.abs().max()) < 0.01


def test_broadcasting_leaf_advantages_is_group_norm() -> None:
    """An ancestor of two leaves has the mean of their advantages, by hand."""
    nodes, leaf = tree(1, 1, 2, [1])
    weight = group_norm(torch.tensor([0.0, 1.0]), leaf, nodes, eps=0)
    assert weight.tolist() == [0, 0, -1, 1]
    nodes, leaf = tree(1, 1, 2, [0, 1])
    weight = group_norm(torch.tensor([0.0, 0.0, 0.0, 4.0]), leaf, nodes, eps=0)
    torch.testing.assert_close(
        weight[1:3], torch.stack([weight[leaf[:2]].mean(), weight[leaf[2:]].mean()])
    )


def test_wrong_options_are_named() -> None:
    nodes, leaf = comb(1, 2, 3, 2)
    reward = torch.zeros(len(leaf))
    with pytest.raises(ConfigError, match="needs log_prob"):
        depth_norm(reward, leaf, nodes, fusion="softmax")
    for temperature in (0.0, -1.0, NAN):
        with pytest.raises(ConfigError, match=f"temperature > 0, got {temperature}"):
            depth_norm(
                reward,
                leaf,
                nodes,
                fusion="softmax",
                temperature=temperature,
                log_prob=edges(nodes, 0),
            )
    with pytest.raises(ConfigError, match='"mean" or "softmax".*\'median\''):
        depth_norm(reward, leaf, nodes, fusion="median")  # type: ignore[arg-type]
