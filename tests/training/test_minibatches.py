"""Dealing decisions out: what stays together, what comes first, how full the calls are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import run
from torch import Tensor

from flowrl.algorithms.nodes import decision_nodes, states_of
from flowrl.algorithms.plans.side_branches import rake
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full
from flowrl.core.types import Rollout
from flowrl.training.minibatches import Minibatch, cut, deal


def dealt(
    ro: Rollout, updates: int, order: Any = "random", segment: Tensor | None = None, seed: int = 0
) -> list[Minibatch]:
    rng = torch.Generator().manual_seed(seed)
    nodes = decision_nodes(ro)
    unit = states_of(ro, nodes) if segment is None else segment[nodes]
    return deal(ro, nodes, unit=unit, updates=updates, order=order, generator=rng)


def calls_of(ro: Rollout, part: Minibatch, size: int) -> list[Tensor]:
    return cut(part, states_of(ro, part.node), size)


@settings(max_examples=30, deadline=None)
@given(
    updates=st.integers(1, 7),
    order=st.sampled_from(["random", "step"]),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_decision_once_families_together_calls_no_larger_than_asked(
    updates: int, order: str, size: int, seed: int
) -> None:
    ro = run(tree(0, steps=6, noise_scale=0.5, splits=[0, 2], branch=3, ode_last=1))
    shares = dealt(ro, updates, order, seed=seed)
    assert len(shares) <= updates
    everything = torch.cat([share.node for share in shares])
    assert torch.equal(everything.sort().values, decision_nodes(ro))
    owners = [set(ro.tree.parent[share.node].tolist()) for share in shares]
    assert sum(map(len, owners)) == len(set().union(*owners))  # no state in two shares
    for share in shares:
        calls = calls_of(ro, share, size)
        assert torch.equal(torch.cat(calls), share.node)
        states = [set(ro.tree.parent[nodes].tolist()) for nodes in calls]
        assert all(len(s) <= size for s in states) and sum(map(len, states)) == len(
            set().union(*states)
        )
        assert len(calls) == -(-len(set().union(*states)) // size)  # as full as they can be


def test_order_step_gives_each_update_one_step() -> None:
    """G2RPO: as many updates as trained steps, the noisiest first."""
    ro = run(rake(0, steps=8, noise_scale=0.5, branch=4, high=5))
    shares = dealt(ro, 5, "step")
    assert [set((ro.tree.step[s.node] - 1).tolist()) for s in shares] == [{0}, {1}, {2}, {3}, {4}]
    mixed = dealt(ro, 5, "random")
    assert any(len(set(ro.tree.step[s.node].tolist())) > 1 for s in mixed)


def test_segments_stay_together_in_shares_and_calls() -> None:
    ro = run(full(0, steps=6, noise_scale=0.5, ode_last=1))
    chunk = torch.where(ro.tree.step <= 2, 0, 1)
    root = torch.arange(len(ro.x))
    for node in range(len(ro.x)):
        if ro.tree.parent[node] >= 0:
            root[node] = root[ro.tree.parent[node]]
    segment = torch.where(ro.tree.std > 0, 2 * root + chunk, -1)
    shares = dealt(ro, 3, segment=segment)
    seen: list[int] = []
    for share in shares:
        for nodes in calls_of(ro, share, 7):
            ids = segment[nodes].unique().tolist()
            seen += ids
            for one in ids:  # whole: every decision of the segment is in this call
                assert int((segment[nodes] == one).sum()) == int((segment == one).sum())
            assert len(nodes) <= 7
    assert len(seen) == len(set(seen)) == 12  # 6 samples x 2 chunks


def test_a_segment_larger_than_a_call_is_a_call_of_its_own() -> None:
    ro = run(full(0, steps=6, noise_scale=0.5, ode_last=1), group_size=1)
    segment = torch.where(ro.tree.std > 0, ro.tree.group, -1)
    (share,) = dealt(ro, 1, segment=segment)
    assert [len(nodes) for nodes in calls_of(ro, share, 2)] == [5, 5, 5]


def test_nothing_left_needs_no_call() -> None:
    ro = run(full(0, steps=3, noise_scale=0.5))
    empty = torch.zeros(0, dtype=torch.int64)
    assert calls_of(ro, Minibatch(empty, empty), 4) == []


@pytest.mark.parametrize("order", ["random", "step"])
def test_the_deal_follows_from_the_seed(order: str) -> None:
    ro = run(full(0, steps=6, noise_scale=0.5))
    one, same, other = (dealt(ro, 2, order, seed=seed)[0].node for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
