"""G2RPO's advantages: a z-score per prompt, step and stride, summed over strides."""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch
from forests import Forest, chain, comb, rake, random_rake, reordered, rewards, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm
from flowrl.algorithms.credit.granular import granular_norm
from flowrl.algorithms.reward_mix.aggregate import advantage_sum
from flowrl.core.errors import ConfigError
from flowrl.core.types import Scores

NAN = float("nan")
SEED = st.integers(0, 10**6)
Drawn = tuple[Forest, dict[str, object]]


def slow(forest: Forest, reward: Tensor, *, eps: float = 1e-8, ddof: int = 1) -> list[float]:
    """Collect each draw's images in Python, z-score stride by stride, and add."""
    nodes, leaf = forest
    scored = dict(zip(leaf.tolist(), reward.tolist(), strict=True))
    draws = [v for v in range(len(nodes.std)) if nodes.std[v] > 0]
    below = {v: sorted(u for u in scored if nodes.parent[u] == v) for v in draws}
    strides = max(1, *(len(row) for row in below.values())) if draws else 1
    values = {v: [scored[u] for u in (below[v] or [v] * strides)] for v in draws}
    values = {v: row for v, row in values.items() if not any(map(math.isnan, row))}
    weight = [0.0] * len(nodes.std)
    for v, row in values.items():
        for j in range(strides):
            peers = [
                values[u][j]
                for u in values
                if nodes.group[u] == nodes.group[v] and nodes.step[u] == nodes.step[v]
            ]
            spread = (stdev(peers) if ddof else pstdev(peers)) if len(peers) > ddof else 0.0
            weight[v] += (row[j] - fmean(peers)) / (spread + eps)
    for v, row in below.items():
        for u in row:
            weight[u] = weight[v]
    return weight


def test_by_hand() -> None:
    """Two draws, strides 1 and 2: ddof 1 gives +-1/sqrt(2) for each stride, whatever the gap; they
    agree, then not."""
    nodes, leaf = rake(1, 1, 4, 2, high=1, strides=(1, 2))
    h = math.sqrt(0.5)
    for values, expected in (([1.0, 3.0, 0.0, 50.0], 2 * h), ([1.0, 3.0, 50.0, 0.0], 0.0)):
        weight = granular_norm(torch.tensor(values), leaf, nodes, eps=0)
        assert weight.tolist() == pytest.approx(
            [0, -expected, expected, -expected, expected, -expected, expected]
        )


def test_strides_are_told_apart_by_the_order_of_node_ids() -> None:
    """A third draw, eps 0, ddof 0. Stride 1: 0, 0, 3 -> -1/sqrt(2), -1/sqrt(2), sqrt(2); stride 2:
    3, 0, 0 mirrored."""
    nodes, leaf = rake(1, 1, 4, 3, high=1, strides=(1, 2))
    weight = granular_norm(torch.tensor([0.0, 0, 3, 3, 0, 0]), leaf, nodes, eps=0, ddof=0)[1:4]
    assert weight.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(2), math.sqrt(0.5)])


@given(
    random_rake(),
    SEED,
    st.sampled_from([0, 3]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0, 1]),
)
@settings(max_examples=100, deadline=None)
def test_weights_are_the_slow_ones(
    drawn: Drawn, seed: int, kinds: int, missing: float, ddof: int
) -> None:
    """Oracle: plain Python above; rakes with one and more strides, roots, steps, and draws that are
    leaves."""
    forest, _ = drawn
    reward = rewards(len(forest[1]), seed, kinds=kinds, missing=missing)
    got = granular_norm(reward, forest[1], forest[0], eps=1e-4, ddof=ddof)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(
        slow(forest, reward, eps=1e-4, ddof=ddof), abs=2e-5, rel=1e-5
    )


@given(random_rake(), SEED)
@settings(max_examples=40, deadline=None)
def test_order_of_samples_and_leaves_does_not_matter(drawn: Drawn, seed: int) -> None:
    (nodes, leaf), _ = drawn
    reward = rewards(len(leaf), seed)
    (moved, moved_leaf), new, place = reordered((nodes, leaf), seed)
    got = granular_norm(reward[place], moved_leaf, moved)
    torch.testing.assert_close(got[new], granular_norm(reward, leaf, nodes), rtol=1e-5, atol=1e-6)


@given(random_rake(), SEED, st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_weights_of_a_prompt_and_step_sum_to_zero(drawn: Drawn, seed: int, missing: float) -> None:
    """For one stride alone and for their sum."""
    (nodes, leaf), _ = drawn
    weight = granular_norm(rewards(len(leaf), seed, missing=missing), leaf, nodes).double()
    key = torch.where(nodes.std > 0, nodes.group * 100 + nodes.step, 0)
    sums = torch.zeros(int(key.max()) + 1, dtype=torch.float64).index_add(
        0, key, weight * (nodes.std > 0)
    )
    assert float(sums.abs().max()) < 1e-5


@pytest.mark.parametrize("value", [0.0, 0.1, 26.73])
def test_equal_rewards_give_exactly_no_weight(value: float) -> None:
    nodes, leaf = rake(2, 2, 4, 3, high=3, strides=(1, 2))
    got = granular_norm(torch.full((len(leaf),), value), leaf, nodes, eps=0)
    assert torch.equal(got, torch.zeros(len(nodes.std)))


def test_one_stride_is_the_depth_norm_of_the_draws() -> None:
    """With one stride a draw has one image; `depth_norm` keeps draws and trunk apart, so both say
    the same."""
    nodes, leaf = rake(2, 2, 4, 5, high=3)
    reward = rewards(len(leaf), 2)
    draws = nodes.std > 0
    expected = depth_norm(reward, leaf, nodes, eps=1e-8, ddof=1)
    torch.testing.assert_close(granular_norm(reward, leaf, nodes)[draws], expected[draws])


def test_one_noisy_step_is_plain_grpo() -> None:
    """Draws that are leaves, one per root: Dance's z-score of the group."""
    nodes, leaf = chain(2, 4, 1)
    reward = rewards(8, 5)
    expected = group_norm(reward, leaf, nodes, eps=1e-8, ddof=1)[leaf]
    torch.testing.assert_close(granular_norm(reward, leaf, nodes)[leaf], expected)


def test_a_draw_that_is_a_leaf_counts_for_every_stride() -> None:
    """Steps 1 and 2 of 2 with the same rewards at every stride: both steps' weights are twice the
    z-score."""
    nodes, leaf = rake(1, 1, 2, 3, strides=(1, 2))
    z = torch.tensor([0.2, 0.9, 0.4])
    weight = granular_norm(z.repeat(3), leaf, nodes)[nodes.std > 0]
    expected = 2 * (z - z.mean()) / z.std()
    torch.testing.assert_close(weight, expected.repeat(2), rtol=1e-5, atol=1e-6)


def test_an_unscored_image_takes_its_draw_out() -> None:
    """Draw 0 misses its second stride: weight 0; the other two are compared with each other alone,
    by hand."""
    nodes, leaf = rake(1, 1, 4, 3, high=1, strides=(1, 2))
    weight = granular_norm(torch.tensor([9.0, 1, 2, NAN, 1, 2]), leaf, nodes, eps=0)
    assert weight[1:4].tolist() == pytest.approx([0, -math.sqrt(2), math.sqrt(2)])
    nothing = granular_norm(torch.full((6,), NAN), leaf, nodes)
    assert torch.equal(nothing, torch.zeros(len(nodes.std)))


def test_several_rewards_are_summed_by_the_aggregator() -> None:
    """G2RPO adds z-scores over strides and rewards: sum over rewards of the slow oracle."""
    nodes, leaf = rake(2, 1, 4, 4, high=3, strides=(1, 2))
    values = {"a": rewards(len(leaf), 0), "b": 100 * rewards(len(leaf), 1)}
    scores = Scores(values, {"a": 1.0, "b": 1.0}, leaf, nodes)
    weight = advantage_sum(scores, lambda reward: granular_norm(reward, leaf, nodes)).advantage
    expected = torch.tensor(slow((nodes, leaf), values["a"])) + torch.tensor(
        slow((nodes, leaf), values["b"])
    )
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forest", [chain(1, 2, 3), tree(1, 1, 3, [0]), comb(1, 2, 3, 2)])
def test_other_forests_are_refused(forest: Forest) -> None:
    nodes, leaf = forest
    with pytest.raises(ConfigError, match="granular_norm: expected .* plan: {fn: rake"):
        granular_norm(torch.zeros(len(leaf)), leaf, nodes)
