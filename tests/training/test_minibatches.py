"""Dealing decisions out: what stays together, what comes first, how full the calls are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import run
from torch import Tensor

from flowrl.algorithms.forest import decision_nodes, states_of
from flowrl.algorithms.plans.trees import rake, tree
from flowrl.algorithms.plans.windows import full
from flowrl.core.types import Rollout
from flowrl.training.batches import Minibatch, cut, deal


def dealt(
    ro: Rollout, updates: int, order: Any = "random", segment: Tensor | None = None, seed: int = 0
) -> list[Minibatch]:
    nodes, rng = decision_nodes(ro), torch.Generator().manual_seed(seed)
    unit = states_of(ro, nodes) if segment is None else segment[nodes]
    return deal(ro, nodes, unit=unit, updates=updates, order=order, generator=rng)


@pytest.mark.parametrize("updates", range(1, 40))
def test_as_many_updates_as_were_asked_for(updates: int) -> None:
    """Of units that do not divide evenly, too: their numbers differ by one at most."""
    ro = run(full(0, steps=6, noise_scale=0.5), group_size=5)
    count = len(decision_nodes(ro))
    sizes = [len(part.node) for part in dealt(ro, updates)]
    assert len(sizes) == min(updates, count) and max(sizes) - min(sizes) <= 1
    assert sum(sizes) == count


def calls_of(ro: Rollout, part: Minibatch, size: int) -> list[Tensor]:
    return [call.node for call in cut(part, states_of(ro, part.node), size)]


def states(ro: Rollout, nodes: Tensor) -> set[int]:
    return set(ro.tree.parent[nodes].tolist())


def disjoint(sets: list[set[int]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 7), st.sampled_from(["random", "step"]), st.integers(1, 9), st.integers(0, 99)
)
def test_every_decision_once_families_together_calls_no_larger_than_asked(
    updates: int, order: str, size: int, seed: int
) -> None:
    ro = run(tree(0, steps=6, noise_scale=0.5, splits=[0, 2], branch=3, ode_last=1))
    shares = dealt(ro, updates, order, seed=seed)
    everything = torch.cat([share.node for share in shares])
    assert len(shares) <= updates and torch.equal(everything.sort().values, decision_nodes(ro))
    assert disjoint([states(ro, share.node) for share in shares])
    for share in shares:
        calls = calls_of(ro, share, size)
        assert torch.equal(torch.cat(calls), share.node)
        owners = [states(ro, nodes) for nodes in calls]
        assert max(map(len, owners)) <= size and disjoint(owners)
        assert len(calls) == -(-len(set().union(*owners)) // size)  # as full as they can be


def test_order_step_gives_each_update_one_step() -> None:
    """G2RPO: as many updates as trained steps, the noisiest first."""
    ro = run(rake(0, steps=8, noise_scale=0.5, branch=4, high=5))
    steps = [ro.tree.step[share.node].unique().tolist() for share in dealt(ro, 5, "step")]
    assert steps == [[1], [2], [3], [4], [5]]
    assert any(len(ro.tree.step[share.node].unique()) > 1 for share in dealt(ro, 5, "random"))


def test_segments_stay_together_in_shares_and_calls() -> None:
    ro = run(full(0, steps=6, noise_scale=0.5, ode_last=1))
    root = torch.arange(len(ro.x))
    for node in range(len(ro.x)):
        if ro.tree.parent[node] >= 0:
            root[node] = root[ro.tree.parent[node]]
    segment = torch.where(ro.tree.std > 0, 2 * root + (ro.tree.step > 2), -1)
    seen: list[int] = []
    for share in dealt(ro, 3, segment=segment):
        for nodes in calls_of(ro, share, 7):
            ids, counts = segment[nodes].unique(return_counts=True)
            seen += ids.tolist()
            whole = [int((segment == one).sum()) for one in ids]
            assert counts.tolist() == whole and len(nodes) <= 7
    assert len(seen) == len(set(seen)) == 12  # 6 samples x 2 chunks


def test_a_segment_larger_than_a_call_is_a_call_of_its_own() -> None:
    ro = run(full(0, steps=6, noise_scale=0.5, ode_last=1), group_size=1)
    segment = torch.where(ro.tree.std > 0, ro.tree.group, -1)
    (share,) = dealt(ro, 1, segment=segment)
    assert [len(nodes) for nodes in calls_of(ro, share, 2)] == [5, 5, 5]
    empty = torch.zeros(0, dtype=torch.int64)
    assert calls_of(ro, Minibatch(empty, empty), 4) == []


@pytest.mark.parametrize("order", ["random", "step"])
def test_the_deal_follows_from_the_seed(order: str) -> None:
    ro = run(full(0, steps=6, noise_scale=0.5))
    one, same, other = (dealt(ro, 2, order, seed=seed)[0].node for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


# ----------------------------------------- units that share a state go through the network together

# states of each unit in the order of the minibatch, largest call -> states of each call
SHARING = [
    # the first chunks of 4 samples of one prompt: their first state is common, 5 rows in place of 8
    ([{0, 11}, {0, 12}, {0, 13}, {0, 14}], 5, [{0, 11, 12, 13, 14}]),
    # two prompts, mixed: each is one call
    ([{0, 11}, {1, 21}, {0, 12}, {1, 22}], 3, [{0, 11, 12}, {1, 21, 22}]),
    # too many for one call: the common state is computed again
    ([{0, 11}, {0, 12}, {0, 13}], 3, [{0, 11, 12}, {0, 13}]),
    # a unit that is larger than a call stays whole
    ([{0, 11, 12, 13}, {0, 14}], 3, [{0, 11, 12, 13}, {0, 14}]),
    # nothing is shared: the order stays
    ([{5, 6}, {1, 2}, {3}], 3, [{5, 6}, {1, 2, 3}]),
]


@pytest.mark.parametrize(("units", "size", "wanted"), SHARING)
def test_calls_of_shared_states(units: list[set[int]], size: int, wanted: list[set[int]]) -> None:
    rows = [(place, state) for place, states in enumerate(units) for state in sorted(states)]
    place, state = (torch.tensor(column) for column in zip(*rows, strict=True))
    node = torch.arange(len(rows))
    calls = cut(Minibatch(node, place), state, size)
    assert [set(state[call.node].tolist()) for call in calls] == wanted
    assert sorted(torch.cat([call.node for call in calls]).tolist()) == node.tolist()
    for call in calls:
        # a unit is in one call
        mine = set(place[call.node].tolist())
        assert sum(len(units[p]) for p in mine) == len(call.node)
        # each state is one row of the network
        first, index = call.rows
        assert len(first) == len(set(state[call.node].tolist()))
        assert torch.equal(state[call.node][first][index], state[call.node])
