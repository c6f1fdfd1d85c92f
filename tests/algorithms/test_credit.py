"""Rewards to weights: fixtures of the published normalisations and identities on forests."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.forest import normalize_by, subtree_mean
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree

REWARD = torch.tensor([0.2, 0.9, 0.5, 0.5, 0.8, 0.1, 0.5, 0.5, 0.5, 0.7, 0.5, 0.5])
NAN = float("nan")


def chains(groups: list[int], steps: int = 3) -> tuple[Tensor, Tree]:
    """One unforked chain per entry of groups, noise at every step -> leaf, tree."""
    count = len(groups)
    parent = torch.arange(-count, count * steps).clamp_min(-1)
    step = torch.arange(steps + 1).repeat_interleave(count)
    group = torch.tensor(groups).repeat(steps + 1)
    return torch.arange(count * steps, count * (steps + 1)), Tree(
        parent, step, (step > 0).float(), group
    )


def random_forest(seed: int) -> tuple[Tensor, Tree]:
    """Random forest with leaves at several depths; two groups."""
    rng = random.Random(seed)
    parent, step, group = [-1, -1, -1], [0, 0, 0], [0, 1, 1]
    for node in range(3, 40):
        above = rng.randrange(node)
        parent.append(above)
        step.append(step[above] + rng.randint(1, 3))
        group.append(group[above])
    order = torch.tensor(parent)
    leaf = torch.tensor([v for v in range(40) if v not in parent])
    return leaf, Tree(order, torch.tensor(step), (order >= 0).float(), torch.tensor(group))


def below(node: int, leaf: Tensor, tree: Tree) -> list[int]:
    """Positions in leaf of the leaves at or under node, by walking up: the plain definition."""

    def under(v: int) -> bool:
        while v != -1 and v != node:
            v = int(tree.parent[v])
        return v == node

    return [i for i, v in enumerate(leaf.tolist()) if under(v)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [  # reference fixtures, numpy float64; eps 1e-4 for ddof 0 as in Flow-GRPO
        (
            {"std": "global"},
            [
                -1.417928,
                1.890571,
                0,
                0,
                1.417928,
                -1.890571,
                *[-0.157548] * 3,
                0.787738,
                *[-0.157548] * 2,
            ],
        ),
        ({"std": "group"}, [-1.038871, 1.385161, 0, 0, 1.038871, -1.385161]),
        ({"std": "group", "ddof": 1}, [-0.948383, 1.264511, 0, 0, 0.948383, -1.264511]),
    ],
)
def test_group_norm_fixtures(options: dict[str, object], expected: list[float]) -> None:
    leaf, tree = chains([4] * 6 + [7] * 6)
    weight = group_norm(REWARD, leaf, tree, **options)  # type: ignore[arg-type]
    assert weight.dtype == torch.float32
    assert weight[leaf][: len(expected)].tolist() == pytest.approx(expected, abs=2e-6)
    assert torch.equal(
        weight.reshape(4, 12), weight[leaf].expand(4, 12)
    )  # every decision of a chain has its weight


@pytest.mark.parametrize("std", ["group", "global"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_weights_of_a_group_sum_to_zero(std: str, ddof: int) -> None:
    leaf, tree = chains([0, 1, 2, 1, 0, 2, 2, 1, 0, 1])
    reward = torch.randn(10, generator=torch.Generator().manual_seed(0))
    weight = group_norm(reward, leaf, tree, std=std, ddof=ddof)[leaf]  # type: ignore[arg-type]
    sums = torch.zeros(3).index_add(0, tree.group[leaf], weight)
    assert sums.tolist() == pytest.approx([0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("norm", [group_norm, depth_norm, sibling_norm])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 26.73])
@pytest.mark.parametrize("eps", [1e-4, 1e-8, 0.0])
def test_equal_rewards_give_exactly_no_weight(norm, value: float, eps: float) -> None:  # type: ignore[no-untyped-def]
    leaf, tree = random_forest(1)
    weight = norm(torch.full((len(leaf),), value), leaf, tree, eps=eps)
    assert torch.equal(weight, torch.zeros(40))


def test_eps_is_added_to_the_std() -> None:
    """[0, 1]: mean .5, ddof-0 std .5 -> .5 / (.5 + eps)."""
    got = normalize_by(torch.tensor([0.0, 1.0]), torch.zeros(2), eps=0.5)
    assert got.tolist() == pytest.approx([-0.5, 0.5])


def test_unscored_leaves_are_left_out() -> None:
    """NaN leaves a group's numbers as if it were not there, and gets weight 0."""
    leaf, tree = chains([0] * 7 + [1] * 3)
    reward = torch.cat(
        [REWARD[:3], torch.tensor([NAN]), REWARD[3:6], torch.tensor([NAN, NAN, NAN])]
    )
    weight = group_norm(reward, leaf, tree)[leaf]
    expected = [-1.038871, 1.385161, 0, 0, 0, 1.038871, -1.385161, 0, 0, 0]
    assert weight.tolist() == pytest.approx(expected, abs=2e-6)
    everything = group_norm(reward, leaf, tree, std="global")[leaf]
    assert bool(everything.isfinite().all()) and everything[3] == 0
    alone = group_norm(torch.tensor([5.0]), *chains([0]), ddof=1)  # one image has no baseline
    assert alone.tolist() == [0] * 4


def test_means_do_not_lose_digits_to_a_large_offset() -> None:
    """Adding a constant to all rewards of a group changes no weight: float64 inside, exact for
    these numbers."""
    reward = torch.tensor([1.0, 2.0, 4.0, 5.0])
    keys = torch.zeros(4)
    assert torch.equal(normalize_by(reward, keys), normalize_by(reward + 4096, keys))


@pytest.mark.parametrize("seed", range(5))
def test_subtree_mean_is_the_mean_of_the_leaves_below(seed: int) -> None:
    """Oracle: walking up from each leaf, in Python."""
    leaf, tree = random_forest(seed)
    values = torch.randn(len(leaf), generator=torch.Generator().manual_seed(seed))
    values[::4] = NAN
    got = subtree_mean(values, leaf, tree).tolist()
    for node in range(40):
        scored = [float(values[i]) for i in below(node, leaf, tree) if not math.isnan(values[i])]
        if scored:
            assert got[node] == pytest.approx(sum(scored) / len(scored), abs=1e-12)
        else:
            assert math.isnan(got[node])


def test_subtree_mean_without_leaves_is_nan_and_weighs_nothing() -> None:
    tree = Tree(
        torch.tensor([-1, 0, 0]),
        torch.tensor([0, 1, 1]),
        torch.tensor([0.0, 1, 1]),
        torch.zeros(3).long(),
    )
    leaf = torch.tensor([1])
    assert subtree_mean(torch.tensor([2.0]), leaf, tree)[:2].tolist() == [2, 2]
    assert math.isnan(subtree_mean(torch.tensor([2.0]), leaf, tree)[2])
    assert group_norm(torch.tensor([2.0]), leaf, tree).tolist() == [0, 0, 0]


@pytest.mark.parametrize("options", [{}, {"ddof": 1, "eps": 1e-8}])
def test_depth_norm_is_group_norm_on_chains(options: Any) -> None:
    leaf, tree = chains([4] * 6 + [7] * 6)
    torch.testing.assert_close(
        depth_norm(REWARD, leaf, tree, **options), group_norm(REWARD, leaf, tree, **options)
    )


def test_depth_norm_of_a_small_tree() -> None:
    """One root, two children, two leaves each, ddof 1, eps 0: two-node depths always give
    1/sqrt(2), by hand."""
    parent, step = torch.tensor([-1, 0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 2, 2, 2, 2])
    tree = Tree(parent, step, (step > 0).float(), torch.zeros(7, dtype=torch.int64))
    leaf, reward = torch.arange(3, 7), torch.tensor([1.0, 2.0, 3.0, 6.0])
    weight = depth_norm(reward, leaf, tree, ddof=1, eps=0)
    assert weight[:3].tolist() == pytest.approx([0, -math.sqrt(0.5), math.sqrt(0.5)])
    assert float(weight[3:].mean()) == pytest.approx(0, abs=1e-7) and float(
        weight[3:].std()
    ) == pytest.approx(1)
    siblings = sibling_norm(reward, leaf, tree, ddof=1, eps=0)
    h = math.sqrt(0.5)
    assert siblings.tolist() == pytest.approx([0, -h, h, -h, h, -h, h])


def test_depth_norm_keeps_previews_apart_from_decisions() -> None:
    """A preview (std 0) at the depth of the last decisions must not enter their mean."""
    tree = Tree(
        torch.tensor([-1, 0, 0, 1, 2, 1]),
        torch.tensor([0, 1, 1, 2, 2, 2]),
        torch.tensor([0, 1.0, 1, 1, 1, 0]),
        torch.zeros(6, dtype=torch.int64),
    )
    weight = depth_norm(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([3, 4, 5]), tree, eps=0)
    assert weight[3:5].tolist() == pytest.approx([-1, 1])


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="'batch'"):
        normalize_by(REWARD, torch.zeros(12), std="batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="eps=-1"):
        normalize_by(REWARD, torch.zeros(12), eps=-1)


def test_a_trunk_is_no_sibling_of_the_draws_beside_it() -> None:
    """A rake of 2 steps with 2 children each, rewards 0, 1 and 5, 5: -1 and +1 at the first step, 0
    at the second."""
    #                     root  a   b  trunk  c   d   leaves of a, b, c, d
    parent = torch.tensor([-1, 0, 0, 0, 3, 3, 1, 2, 4, 5])
    step = torch.tensor([0, 1, 1, 1, 2, 2, 4, 4, 4, 4])
    std = torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    tree = Tree(parent, step, std, torch.zeros(10, dtype=torch.int64))
    weight = sibling_norm(torch.tensor([0.0, 1, 5, 5]), torch.tensor([6, 7, 8, 9]), tree, eps=0.0)
    assert weight[[1, 2, 4, 5]].tolist() == [-1, 1, 0, 0]
