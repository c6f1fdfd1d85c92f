"""TP-GRPO: increments, turning points, balance; against a slow reading of the rules, sample by
sample."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, pstdev, stdev

import pytest
import torch
from forests import Forest, chain, comb, random_comb, reordered, rewards, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of
from flowrl.algorithms.credit.turning_point import _step_rewards, turning_point
from flowrl.algorithms.plans.side_branches import comb as comb_plan
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Tree
from flowrl.models.toy import LinearFlow

NAN = float("nan")
SEED = st.integers(0, 10**6)
Drawn = tuple[Forest, dict[str, object]]


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def path_of(node: int, tree_: Tree) -> list[int]:
    out = [node]
    while tree_.parent[out[-1]] >= 0:
        out.append(int(tree_.parent[out[-1]]))
    return out


def chains(tree_: Tree, leaf: Tensor, reward: Tensor) -> list[tuple[int, list[int], list[float]]]:
    """Read (group, decisions, R_0 .. R_w) of each root, by walking up from every leaf."""
    out = []
    for root in [v for v in range(len(tree_.parent)) if tree_.parent[v] < 0]:
        seen: dict[int, tuple[int, float]] = {}
        members: set[int] = set()
        for place, node in enumerate(leaf.tolist()):
            path = path_of(node, tree_)
            if path[-1] == root:
                noisy = [v for v in path if tree_.std[v] > 0]
                members |= set(noisy)
                here = (node, float(reward[place]))
                seen[len(noisy)] = max(seen.get(len(noisy), here), here)
        out.append(
            (int(tree_.group[root]), sorted(members), [seen[t][1] for t in range(len(members) + 1)])
        )
    return out


def slow_turn(path: list[float], t: int, strict: bool) -> bool:
    """Say whether draw t = 1 .. w of one sample is a turning point."""
    gain = [math.nan] + [path[i] - path[i - 1] for i in range(1, len(path))]
    trend = [sign(d) * sign(path[-1] - path[0]) for d in gain]
    on = sign(gain[t]) * sign(path[-1] - path[t]) > 0
    return on if t == 1 else trend[t - 1] < 0 < trend[t] and (on or not strict)


def slow_known(path: list[float], t: int) -> bool:
    return not any(math.isnan(path[i]) for i in {0, len(path) - 1, t, t - 1, max(t - 2, 0)})


def slow(
    forest: Forest,
    reward: Tensor,
    *,
    strict: bool = True,
    balance: bool = True,
    eps: float = 1e-4,
    ddof: int = 0,
) -> list[float]:
    """Apply the reference's rules one sample at a time, then z-score per prompt and step."""
    nodes, leaf = forest
    samples = chains(nodes, leaf, reward)
    points = [
        (path[-1] - path[0], i, t)
        for i, (_, _, path) in enumerate(samples)
        for t in range(1, len(path))
        if slow_known(path, t) and slow_turn(path, t, strict)
    ]
    up, down = ([p for p in points if sign(p[0]) == s] for s in (1, -1))
    if balance and up and down:
        count = min(len(up), len(down))
        up, down = (sorted(side, key=lambda p: -abs(p[0]))[:count] for side in (up, down))
    kept = {(i, t) for _, i, t in up + down}
    worth: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for i, (group, members, path) in enumerate(samples):
        for t, node in enumerate(members, start=1):
            if slow_known(path, t):
                value = path[-1] - path[t - 1] if (i, t) in kept else path[t] - path[t - 1]
                worth.setdefault((group, t), []).append((node, value))
    weight = [0.0] * len(nodes.parent)
    for row in worth.values():
        values = [value for _, value in row]
        spread = (stdev(values) if ddof else pstdev(values)) if len(values) > ddof else 0.0
        for node, value in row:
            weight[node] = (value - fmean(values)) / (spread + eps)
    for v in range(len(weight)):
        noisy = [u for u in path_of(v, nodes) if nodes.std[u] > 0]
        weight[v] = weight[noisy[0]] if noisy else 0.0
    return weight


def one(
    values: list[list[float]], *, strict: bool = True, balance: bool = False
) -> list[list[float]]:
    """Step rewards of samples given as R_0 .. R_w."""
    return _step_rewards(torch.tensor(values, dtype=torch.float64), strict, balance).tolist()


def test_hand_made_sequence_of_the_reference() -> None:
    """R = 0, -1, 1, 2: d = -1, 2, 1; q = -, +, +; t = 2 turns around and counts R_w - R_1 = 3."""
    for strict in (True, False):
        assert one([[0, -1, 1, 2]], strict=strict) == [[-1, 3, 1]]


def test_strict_asks_that_the_rest_goes_on_in_the_new_direction() -> None:
    """R = 0, -1, 3, 2: d = -1, 4, -1, R_w - R_2 = -1 against d_2 = 4: a turning point only by
    definition 4.1."""
    assert one([[0, -1, 3, 2]]) == [[-1, 4, -1]]
    assert one([[0, -1, 3, 2]], strict=False) == [[-1, 3, -1]]


@pytest.mark.parametrize(
    ("path", "first"),
    [([0.0, 1, 3], 3), ([0.0, -1, -3], -3), ([0.0, 2, 1], 2), ([0.0, -1, 2], -1), ([0.0, 1, 1], 1)],
)
def test_first_draw_is_eligible_if_the_rest_goes_on(path: list[float], first: float) -> None:
    """By hand: sign(d_1) sign(R_w - R_1) > 0 makes it count R_w - R_0, in both definitions."""
    for strict in (True, False):
        assert one([path], strict=strict)[0][0] == first


def test_the_last_draw_counts_the_same_either_way() -> None:
    """R = 0, -1, 2: t = w turns around, but R_w - R_1 is d_w itself; strict says no, since R_w -
    R_w has sign 0."""
    assert one([[0, -1, 2]], strict=True) == one([[0, -1, 2]], strict=False) == [[-1, 3]]


def test_a_tie_makes_no_turning_point() -> None:
    """sign(0) = 0 stops every rule. R = 0, 0, 1, 2: q = 0, +, +; R = 0, 1, -1, 0: G = 0."""
    for strict in (True, False):
        assert one([[0, 0, 1, 2]], strict=strict) == [[0, 1, 1]]
        assert one([[0, 1, -1, 0]], strict=strict) == [[1, -2, 1]]


def test_balance_keeps_the_largest_of_both_signs() -> None:
    """Three rising turning points with G = 2, 3, 4 and one falling: only G = 4 stays; by hand, draw
    2 of each."""
    rising = [[0.0, -1, 1, 2], [0.0, -1, 1, 3], [0.0, -1, 1, 4]]
    falling = [[0.0, 1, -1, -2]]
    assert [row[1] for row in one(rising + falling)] == [3, 4, 5, -3]
    assert [row[1] for row in one(rising + falling, balance=True)] == [2, 2, 5, -3]
    assert [row[1] for row in one(rising, balance=True)] == [3, 4, 5]  # one sign alone: all stay


def test_balance_goes_by_the_whole_gain_not_by_the_bonus() -> None:
    """One falling point, so one rising stays: G = 1.5 with R_w - R_1 = 5.5, not G = 1 with R_w -
    R_1 = 10."""
    got = one([[0.0, -4, 0.25, 1.5], [0.0, -9, 0.5, 1.0], [0.0, 9, -0.5, -1.25]], balance=True)
    assert got == [[-4, 5.5, 1.25], [-9, 9.5, 0.5], [9, -10.25, -0.75]]


def test_equal_gains_are_kept_in_batch_order() -> None:
    """Two rising samples with G = 2, one falling: the first one stays."""
    got = one([[0.0, -1, 1, 2], [0.0, -1, 1, 2], [0.0, 1, -1, -2]], balance=True)
    assert [row[1] for row in got] == [3, 2, -3]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_increments_telescope_to_the_whole_gain(up: list[int], falls: bool, strict: bool) -> None:
    """Where rewards only rise, or only fall, nothing turns after the first draw, and that one is
    paid less the rest.

    By hand: the first draw's payment is R_w - R_0 wherever R_w lies beyond R_1, and the others'
    increments sum to R_w - R_1; exact, since the rewards are whole numbers.
    """
    path = torch.tensor([[0, *itertools.accumulate(up)]], dtype=torch.float64) * (
        -1 if falls else 1
    )
    got = _step_rewards(path, strict, False)
    whole = path[0, -1] - path[0, 0]
    assert float(got[0, 1:].sum()) == float(path[0, -1] - path[0, 1])
    assert float(got[0, 0]) == float(whole)


@given(
    random_comb(),
    SEED,
    st.sampled_from([0, 3]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_weights_are_the_slow_ones(
    drawn: Drawn, seed: int, kinds: int, missing: float, strict: bool, balance: bool
) -> None:
    """Oracle: plain Python above, one sample after the other."""
    forest, _ = drawn
    reward = rewards(len(forest[1]), seed, kinds=kinds, missing=missing)
    options = {"strict": strict, "balance": balance, "ddof": seed % 2}
    got = turning_point(reward, forest[1], forest[0], **options)  # type: ignore[arg-type]
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(slow(forest, reward, **options), abs=2e-5, rel=1e-5)  # type: ignore[arg-type]


@given(random_comb(), SEED)
@settings(max_examples=40, deadline=None)
def test_order_of_samples_and_leaves_does_not_matter(drawn: Drawn, seed: int) -> None:
    """All rewards differ, so that no two samples tie in the balance."""
    (nodes, leaf), _ = drawn
    reward = rewards(len(leaf), seed)
    (moved, moved_leaf), new, place = reordered((nodes, leaf), seed)
    got = turning_point(reward[place], moved_leaf, moved)
    torch.testing.assert_close(got[new], turning_point(reward, leaf, nodes), rtol=1e-5, atol=1e-6)


@given(random_comb(), SEED, st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_weights_of_a_prompt_and_step_sum_to_zero(drawn: Drawn, seed: int, missing: float) -> None:
    (nodes, leaf), _ = drawn
    weight = turning_point(rewards(len(leaf), seed, missing=missing), leaf, nodes).double()
    key = torch.where(nodes.std > 0, nodes.group * 100 + nodes.step, 0)
    sums = torch.zeros(int(key.max()) + 1, dtype=torch.float64).index_add(
        0, key, weight * (nodes.std > 0)
    )
    assert float(sums.abs().max()) < 1e-5


@pytest.mark.parametrize("value", [0.0, 0.1, 26.73])
def test_equal_rewards_give_exactly_no_weight(value: float) -> None:
    nodes, leaf = comb(2, 3, 5, 4)
    assert torch.equal(
        turning_point(torch.full((len(leaf),), value), leaf, nodes, eps=0),
        torch.zeros(len(nodes.std)),
    )


def test_one_prompt_is_not_compared_with_another() -> None:
    """Two prompts of which one has large rewards: each is normalised alone, so scaling it changes
    nothing (eps 0)."""
    nodes, leaf = comb(2, 3, 4, 3)
    reward = rewards(len(leaf), 3).double()
    scale = torch.where(nodes.group[leaf] == 1, 64.0, 1.0)
    options = {"eps": 0.0, "balance": False}
    first = turning_point(reward, leaf, nodes, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(turning_point(reward * scale, leaf, nodes, **options), first)  # type: ignore[arg-type]


def test_an_unscored_image_takes_out_what_reads_it_only() -> None:
    """R_2 of sample 0 is missing: draws 2 and 3 have no d, draw 4 no q before it; draw 1 and the
    others stay."""
    nodes, leaf = comb(1, 3, 6, 5)
    reward = rewards(len(leaf), 7)
    found = comb_of("t", leaf, nodes, baseline=True)
    reward[found.seen[0, 1]] = NAN
    weight = turning_point(reward, leaf, nodes)[found.decision]
    assert (weight[0] == 0).tolist() == [False, True, True, True, False]
    assert bool((weight[1:] != 0).all()) and weight[1:, 1].sum().abs() < 1e-6
    for place in (found.start[0], found.seen[0, -1]):  # the sign of the whole gain is not known
        missing = rewards(len(leaf), 7)
        missing[place] = NAN
        assert turning_point(missing, leaf, nodes)[found.decision][0].tolist() == [0] * 5
    nothing = turning_point(torch.full_like(reward, NAN), leaf, nodes)
    assert torch.equal(nothing, torch.zeros(len(nodes.std)))


def test_without_noise_all_images_of_a_sample_are_one() -> None:
    """h -> 0: R_0 starts from the sample's own x_0, so that every d, and with it every weight, is
    0."""
    model = LinearFlow()
    ro = rollout(
        model,
        model.encode(["a", "bb"]),
        comb_plan(0, steps=5, noise_scale=1e-6, size=4, baseline=True),
        cps,
        sigmas=linear_grid(5, 3.0),
        shape=(3, 4, 4),
        group_size=3,
        generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)],
    )
    found = comb_of("t", ro.leaf, ro.tree, baseline=True)
    assert found.decision.shape == (6, 4)
    reward = ro.x[ro.leaf].mean((1, 2, 3))
    path = reward[torch.cat([found.start[:, None], found.seen], 1)]
    torch.testing.assert_close(path, path[:, :1].expand_as(path), atol=1e-5, rtol=0)
    assert (
        float(path[:, 0].std()) > 0.05
    )  # yet the samples differ, so a baseline of other noise would show
    rounded = (reward * 1000).round() / 1000
    assert torch.equal(turning_point(rounded, ro.leaf, ro.tree), torch.zeros(len(ro.tree.std)))


@pytest.mark.parametrize(
    "forest", [chain(1, 2, 3), tree(1, 1, 3, [0]), comb(1, 2, 3, 3, baseline=False)]
)
def test_other_forests_are_refused(forest: Forest) -> None:
    nodes, leaf = forest
    with pytest.raises(
        ConfigError, match="turning_point: expected .* plan: {fn: comb, baseline: true"
    ):
        turning_point(torch.zeros(len(leaf)), leaf, nodes)
