"""VGPO's reconstruction: discounted rewards along the chain, shares, and an anchor that equal
rewards do not remove."""

from __future__ import annotations

import math
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch
from forests import Forest, chain, comb, random_comb, reordered, rewards, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of
from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.credit.value_anchored import value_anchored
from flowrl.core.errors import ConfigError

NAN = float("nan")
SEED = st.integers(0, 10**6)
Drawn = tuple[Forest, dict[str, object]]


def slow(
    forest: Forest,
    reward: Tensor,
    *,
    gamma: float,
    k: float,
    anchored_steps: int,
    direction: str,
    eps: float,
    ddof: int,
) -> dict[int, float]:
    """Write section 10's formulas out, one sample and step at a time -> {decision: weight}."""
    nodes, leaf = forest
    rows = []
    for root in [v for v in range(len(nodes.parent)) if nodes.parent[v] < 0]:
        decisions, at = [], [root]
        while at:
            at = [
                v for v in range(len(nodes.parent)) if nodes.parent[v] == at[0] and nodes.std[v] > 0
            ]
            decisions += at
        r = []
        for v in decisions:
            seen = [
                u for u in leaf.tolist() if u == v or (nodes.parent[u] == v and nodes.std[u] == 0)
            ]
            r.append(float(reward[leaf.tolist().index(max(seen))]))
        w = range(len(r))
        if direction == "future":
            q = [sum(gamma ** (j - t) * r[j] for j in w if j >= t) for t in w]
        else:
            q = [sum(gamma ** (t - j) * r[j] for j in w if j <= t) for t in w]
        rows.append((int(nodes.group[root]), decisions, q))
    out = {}
    for group, decisions, q in rows:
        for t, v in enumerate(decisions):
            peers = [p[t] for g, _, p in rows if g == group and not any(map(math.isnan, p))]
            if any(map(math.isnan, q)):
                out[v] = 0.0
                continue
            spread = (stdev(peers) if ddof else pstdev(peers)) if len(peers) > ddof else 0.0
            z = (q[t] - fmean(peers)) / (spread + eps)
            share = q[t] / fmean(q) if fmean(q) else 1.0
            out[v] = share * (z + (k if nodes.step[v] - 1 < anchored_steps else 0.0) * q[t])
    return out


@given(
    random_comb(),
    SEED,
    st.sampled_from([0, 3]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.sampled_from(["future", "past"]),
)
@settings(max_examples=150, deadline=None)
def test_weights_are_the_slow_ones(
    drawn: Drawn, seed: int, kinds: int, missing: float, gamma: float, direction: str
) -> None:
    """Oracle: plain Python above."""
    forest, _ = drawn
    reward = rewards(len(forest[1]), seed, kinds=kinds, missing=missing)
    options: dict[str, Any] = {
        "gamma": gamma,
        "k": 0.3,
        "anchored_steps": seed % 4,
        "direction": direction,
    }
    options |= {"eps": 1e-3, "ddof": seed % 2}
    got = value_anchored(reward, forest[1], forest[0], **options)
    expected = slow(forest, reward, **options)
    assert got.dtype == torch.float32
    assert {v: float(got[v]) for v in expected} == pytest.approx(expected, abs=2e-5, rel=1e-5)


def test_without_discount_and_with_constant_rewards_only_the_anchor_is_left() -> None:
    """gamma = 0 makes Q_t = R_t and w = 1, so A = k Q on the first 5 steps, and 0 after them:
    closed form."""
    nodes, leaf = comb(2, 3, 8, 7, preview="x0", baseline=False)
    weight = value_anchored(torch.full((len(leaf),), 0.8), leaf, nodes, gamma=0.0, k=0.25)
    expected = torch.where((nodes.step <= 5) & (nodes.std > 0), 0.25 * 0.8, 0.0)
    torch.testing.assert_close(weight[nodes.std > 0], expected[nodes.std > 0])
    assert torch.equal(weight[(nodes.std > 0) & (nodes.step > 5)], torch.zeros(12))


def test_equal_rewards_do_not_silence_it() -> None:
    """The opposite of every other credit; without an anchor it is silent, exactly."""
    nodes, leaf = comb(1, 4, 4, 3, preview="x0", baseline=False)
    reward = torch.full((len(leaf),), 0.1)
    decision = nodes.std > 0
    assert bool((value_anchored(reward, leaf, nodes)[decision] > 0).all())
    assert torch.equal(
        value_anchored(reward, leaf, nodes, k=0.0, eps=0.0), torch.zeros(len(nodes.std))
    )


def test_the_anchor_does_not_depend_on_the_spread() -> None:
    """Cancelled form: with nearly equal rewards A stays near w k Q; k std Q / (std + eps) would be
    100 times less."""
    nodes, leaf = comb(1, 2, 3, 1, preview="full", baseline=False)
    weight = value_anchored(torch.tensor([0.5, 0.5 + 1e-6]), leaf, nodes, k=0.2)[nodes.std > 0]
    assert float(weight.mean()) == pytest.approx(0.2 * 0.5, rel=1e-3)


def test_terminal_reward_alone_is_grpo() -> None:
    """k = 0, gamma = 1, previews worth 0: Q is constant along the chain, w = 1, so it is Flow-GRPO
    with group std."""
    nodes, leaf = comb(2, 5, 6, 4, baseline=False)
    final = rewards(10, 3)
    reward = torch.cat([torch.zeros(len(leaf) - 10), final])
    weight = value_anchored(reward, leaf, nodes, k=0.0, gamma=1.0)
    plain, plain_leaf = chain(2, 5, 4)
    expected = group_norm(final, plain_leaf, plain)
    torch.testing.assert_close(weight[nodes.std > 0], expected[plain.std > 0])


def test_directions_by_hand() -> None:
    """R = 1, 2, 4, gamma = 1/2. Future: Q = 3, 4, 4; past: 1, 2.5, 5.25. One sample: no z-score, A
    = Q^2 k / mean Q."""
    nodes, leaf = comb(1, 1, 5, 3, baseline=False)
    reward = torch.tensor([1.0, 2.0, 4.0])
    for direction, q in (("future", [3.0, 4.0, 4.0]), ("past", [1.0, 2.5, 5.25])):
        options: Any = {"gamma": 0.5, "k": 1.0, "direction": direction}
        got = value_anchored(reward, leaf, nodes, **options)[nodes.std > 0]
        assert got.tolist() == pytest.approx([x * x / fmean(q) for x in q])


def test_the_last_draw_is_worth_its_finished_image_not_its_preview() -> None:
    """Under the last decision hang an x0 preview and the finished image; the baseline is ignored,
    too."""
    nodes, leaf = comb(1, 1, 4, 2, preview="x0", baseline=True)
    assert len(leaf) == 4  # baseline, preview 1, preview 2, finished
    got = value_anchored(torch.tensor([9.0, 1.0, 9.0, 3.0]), leaf, nodes, gamma=0.0, k=1.0)[
        nodes.std > 0
    ]
    assert got.tolist() == pytest.approx([1 / 2, 9 / 2])


def test_a_chain_of_zeros_has_shares_of_one() -> None:
    """Rewards 0 and 1, eps 0: z = -1 and 1; the zero chain's w is 1 by definition, its anchor 0."""
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    got = value_anchored(torch.tensor([0.0, 1.0, 0.0, 1.0]), leaf, nodes, gamma=0.0, k=0.5, eps=0.0)
    assert got[nodes.std > 0].tolist() == pytest.approx([-1, 1.5, -1, 1.5])


def test_an_unscored_image_takes_its_sample_out() -> None:
    """Samples 0 and 1 get what they get without sample 2."""
    nodes, leaf = comb(1, 3, 4, 3, preview="x0", baseline=False)
    found = comb_of("t", leaf, nodes, baseline=False)
    reward = rewards(len(leaf), 4)
    reward[found.seen[2, 1]] = NAN
    weight = value_anchored(reward, leaf, nodes)[found.decision]
    assert weight[2].tolist() == [0, 0, 0]
    two, two_leaf = comb(1, 2, 4, 3, preview="x0", baseline=False)
    alone = comb_of("t", two_leaf, two, baseline=False)
    small = torch.zeros(len(two_leaf))
    small[alone.seen] = reward[found.seen[:2]]
    torch.testing.assert_close(value_anchored(small, two_leaf, two)[alone.decision], weight[:2])


@given(random_comb(), SEED)
@settings(max_examples=40, deadline=None)
def test_order_of_samples_and_leaves_does_not_matter(drawn: Drawn, seed: int) -> None:
    (nodes, leaf), _ = drawn
    reward = rewards(len(leaf), seed)
    (moved, moved_leaf), new, place = reordered((nodes, leaf), seed)
    got = value_anchored(reward[place], moved_leaf, moved)
    torch.testing.assert_close(got[new], value_anchored(reward, leaf, nodes), rtol=1e-5, atol=1e-6)


def test_negative_rewards_are_refused_with_a_way_out() -> None:
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    with pytest.raises(
        ConfigError, match=r"at least 0.*got -0\.5.*transform, \{fn: clip, low: 0\}"
    ):
        value_anchored(torch.tensor([0.1, NAN, -0.5, 0.2]), leaf, nodes)


@pytest.mark.parametrize(
    "options",
    [{"gamma": 1.1}, {"gamma": NAN}, {"k": -1.0}, {"anchored_steps": -1}, {"direction": "up"}],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        value_anchored(torch.zeros(4), leaf, nodes, **options)


@pytest.mark.parametrize("forest", [chain(1, 2, 3), tree(1, 1, 3, [0])])
def test_other_forests_are_refused(forest: Forest) -> None:
    nodes, leaf = forest
    with pytest.raises(ConfigError, match="value_anchored: expected .* plan: {fn: comb, ..."):
        value_anchored(torch.zeros(len(leaf)), leaf, nodes)
