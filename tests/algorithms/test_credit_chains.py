"""Chains and draws are found in any order of nodes; the forests of the tests are those that the
engine grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import (
    Forest,
    chain,
    comb,
    rake,
    random_comb,
    random_forest,
    random_rake,
    reordered,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import run
from slowcredits import samples, up

from flowrl.algorithms.credit._chains import ancestry, comb_of, rake_of, spread_to_nodes
from flowrl.algorithms.plans import trees
from flowrl.algorithms.plans import windows as plans
from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.config.axes import AXES
from flowrl.config.calls import offers
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan, Transition, Tree

SEED = st.integers(0, 10**6)


def grown(plan: Plan, size: int, transition: Transition = flow_sde) -> Forest:
    """Let the engine sample the plan for two prompts."""
    ro = run(plan, transition, prompts=["a", "bb"], group_size=size)
    return ro.tree, ro.leaf


@pytest.mark.parametrize(
    ("plan", "options", "size", "expected"),
    [
        (plans.full, {"ode_last": 1}, 3, chain(2, 3, 4, ode_last=1)),
        (trees.tree, {"splits": [0, 2]}, 1, tree(2, 1, 4, [0, 2])),
        (trees.rake, {"branch": 3, "low": 1}, 1, rake(2, 1, 4, 3, low=1, high=3)),
        (trees.rake, {"branch": 2, "strides": [1, 2]}, 2, rake(2, 2, 4, 2, high=3, strides=(1, 2))),
        (trees.comb, {"size": 4, "baseline": True}, 3, comb(2, 3, 4, 4)),
        (trees.comb, {"size": 2, "baseline": True}, 3, comb(2, 3, 4, 2)),
        (trees.comb, {"size": 3, "preview": "x0"}, 2, comb(2, 2, 4, 3, baseline=False)),
    ],
)
def test_forests_are_the_engines(plan: Any, options: Any, size: int, expected: Forest) -> None:
    """Same nodes with the same ids; the noise itself is not compared."""
    got, leaf = grown(plan(0, steps=4, noise_scale=0.5, **options), size)
    wanted, wanted_leaf = expected
    assert torch.equal(got.parent, wanted.parent) and torch.equal(got.step, wanted.step)
    assert torch.equal(got.group, wanted.group) and torch.equal(got.std > 0, wanted.std > 0)
    assert sorted(leaf.tolist()) == sorted(wanted_leaf.tolist())


def test_a_last_draw_without_std_is_no_decision() -> None:
    """CPS into sigma 0: the reference's 0/0 step. Its node is the finished sample of the decision
    before."""
    got, leaf = grown(trees.comb(0, steps=3, noise_scale=0.5, size=3, baseline=True), 2, cps)
    wanted, wanted_leaf = comb(2, 2, 3, 3, flat_end=True)
    assert torch.equal(got.parent, wanted.parent) and torch.equal(got.std > 0, wanted.std > 0)
    assert torch.equal(leaf, wanted_leaf)
    found = comb_of("credit", leaf, got, baseline=True)
    assert found.decision.shape == (4, 2)
    assert got.step[found.decision].tolist() == [[1, 2]] * 4
    assert torch.equal(leaf[found.seen[:, 1]], leaf[-4:])  # not the preview beside it


@given(random_forest())
@settings(max_examples=60, deadline=None)
def test_ancestry_is_what_walking_up_finds(forest: Forest) -> None:
    above = ancestry(forest[0])
    for v in range(len(forest[0].parent)):
        path = up(v, forest[0])
        noisy = [u for u in path if forest[0].std[u] > 0]
        expected = (path[-1], len(noisy), noisy[0] if noisy else -1)
        assert (int(above.root[v]), int(above.depth[v]), int(above.decision[v])) == expected


@given(random_comb(), SEED)
@settings(max_examples=60, deadline=None)
def test_combs_are_read_in_any_order_of_samples(drawn: Any, seed: int) -> None:
    """Oracle: walking up from each leaf, in Python; the rewards are the places of the leaves."""
    ((nodes, leaf), _, _), options = reordered(drawn[0], seed), drawn[1]
    found = comb_of("credit", leaf, nodes, baseline=True)
    wanted = samples((nodes, leaf), torch.arange(len(leaf)))
    assert found.decision.tolist() == [sample.draws for sample in wanted]
    places = torch.cat([found.start[:, None], found.seen], 1)
    assert places.tolist() == [sample.path for sample in wanted]
    assert options["window"] - found.decision.shape[1] in (0, 1)


@given(random_rake(), SEED)
@settings(max_examples=60, deadline=None)
def test_rakes_are_read_in_any_order_of_samples(drawn: Any, seed: int) -> None:
    (nodes, leaf), _, _ = reordered(drawn[0], seed)
    found = rake_of("credit", leaf, nodes)
    assert found.decision.tolist() == [v for v in range(len(nodes.std)) if nodes.std[v] > 0]
    for node, places in zip(found.decision.tolist(), found.seen, strict=True):
        below = sorted(v for v in leaf.tolist() if nodes.parent[v] == node)
        assert leaf[places].tolist() == (below or [node] * found.seen.shape[1])


def test_spread_gives_an_image_the_weight_of_its_draw() -> None:
    nodes, leaf = comb(1, 1, 3, 2)  # root, draw 1, draw 2, baseline, preview, finished
    found = comb_of("credit", leaf, nodes, baseline=True)
    weight = spread_to_nodes(torch.tensor([[2.0, float("nan")]], dtype=torch.float64), found.owner)
    assert weight.dtype == torch.float32
    assert weight.tolist() == [0, 2, 0, 0, 2, 0]


def without(forest: Forest, *places: int) -> Forest:
    """Forget leaves."""
    nodes, leaf = forest
    return nodes, leaf[[i for i in range(len(leaf)) if i not in places]]


def twice_seen() -> Forest:
    """A comb with a second preview under its first draw."""
    nodes, leaf = comb(1, 1, 3, 3)
    more = (nodes.parent[leaf[1]], 3, 0.0, 0)
    columns = [torch.cat([row, torch.tensor([one])]) for row, one in zip(nodes, more, strict=True)]
    return Tree(*columns), torch.cat([leaf, torch.tensor([len(nodes.parent)])])


COMB = comb(1, 2, 3, 3)
NO_START = "no image without noise under some initial noises"


@pytest.mark.parametrize(
    ("forest", "words"),
    [
        (tree(1, 2, 3, [1]), "10 draws under 2 initial noises, at most 3 in a row"),
        (tree(1, 1, 3, [0]), "6 draws under 1 initial noises"),
        (rake(1, 1, 3, 2, high=2), "4 draws under 1 initial noises, at most 1 in a row"),
        (comb(1, 2, 1, 1, flat_end=True), "0 draws under 2 initial noises, at most 0 in a row"),
        (chain(1, 2, 3), f"{NO_START} and no preview under some draws"),
        (comb(1, 2, 3, 3, baseline=False), f"got {NO_START}. Use"),
        (without(COMB, 0), f"got {NO_START}. Use"),
        (without(COMB, 4), "got no preview under some draws. Use"),
        (without(COMB, 7), "got no finished image at the end of some chains. Use"),
        (twice_seen(), "several previews under some draws"),
    ],
)
def test_what_is_no_comb_is_refused_by_what_is_missing(forest: Forest, words: str) -> None:
    with pytest.raises(ConfigError, match=r"plan: \{fn: comb, baseline: true, \.\.\.\}") as caught:
        comb_of("my_credit", forest[1], forest[0], baseline=True)
    said = str(caught.value)
    assert said.startswith("my_credit: expected one chain") and words in said


def test_a_baseline_is_not_asked_for_where_it_is_not_needed() -> None:
    nodes, leaf = comb(1, 2, 3, 2, baseline=False)
    assert comb_of("credit", leaf, nodes, baseline=False).start.tolist() == [-1, -1]
    nodes, leaf = chain(1, 2, 3)
    with pytest.raises(ConfigError, match=r"plan: \{fn: comb, \.\.\.\}"):
        comb_of("credit", leaf, nodes, baseline=False)


@pytest.mark.parametrize(
    ("forest", "words"),
    [
        (chain(1, 2, 2), "4 draws, at most 2 in a row"),
        (comb(1, 2, 3, 3, baseline=False), "6 draws, at most 3 in a row"),
        (comb(1, 1, 3, 1), "1 leaves without a draw"),
        (comb(1, 1, 1, 1, flat_end=True), "got 0 draws, at most 0 in a row"),
        (without(rake(1, 1, 3, 2, high=2, strides=(1, 2)), 5), r"with [2, 2, 2, 1] leaves"),
        (without(rake(1, 1, 3, 2, high=2), 0), r"with [0, 1, 1, 1] leaves"),
    ],
)
def test_what_is_no_rake_is_refused(forest: Forest, words: str) -> None:
    with pytest.raises(ConfigError, match=r"plan: \{fn: rake, \.\.\.\}") as caught:
        rake_of("my_credit", forest[1], forest[0])
    assert str(caught.value).startswith("my_credit: expected draws") and words in str(caught.value)


def test_helpers_are_not_offered_to_configs() -> None:
    assert not [path for path in offers(AXES["credit"], "here") if "._chains." in path]
