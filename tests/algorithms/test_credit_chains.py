"""Chains and draws are found in any order of nodes; the forests of the tests are those that the
engine grows."""

from __future__ import annotations

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

from flowrl.algorithms.credit._chains import ancestry, comb_of, rake_of, spread
from flowrl.algorithms.plans import side_branches as combs
from flowrl.algorithms.plans import trees
from flowrl.algorithms.plans import windows as plans
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Plan, Transition, Tree
from flowrl.models.toy import LinearFlow

SEED = st.integers(0, 10**6)


def grown(plan: Plan, size: int, transition: Transition = flow_sde) -> Forest:
    """Let the engine sample the plan for two prompts."""
    model = LinearFlow()
    ro = rollout(
        model,
        model.encode(["a", "bb"]),
        plan,
        transition,
        sigmas=linear_grid(len(plan.noise), 3.0),
        shape=(3, 2, 2),
        group_size=size,
        generators=[torch.Generator().manual_seed(seed) for seed in (0, 1)],
    )
    return ro.tree, ro.leaf


@pytest.mark.parametrize(
    ("plan", "size", "expected"),
    [
        (plans.full(0, steps=4, noise_scale=0.5, ode_last=1), 3, chain(2, 3, 4, ode_last=1)),
        (trees.tree(0, steps=4, noise_scale=0.5, splits=[0, 2]), 1, tree(2, 1, 4, [0, 2])),
        (
            combs.rake(0, steps=4, noise_scale=0.5, branch=3, low=1),
            1,
            rake(2, 1, 4, 3, low=1, high=3),
        ),
        (
            combs.rake(0, steps=4, noise_scale=0.5, branch=2, strides=[1, 2]),
            2,
            rake(2, 2, 4, 2, high=3, strides=(1, 2)),
        ),
        (combs.comb(0, steps=4, noise_scale=0.5, size=4, baseline=True), 3, comb(2, 3, 4, 4)),
        (combs.comb(0, steps=4, noise_scale=0.5, size=2, baseline=True), 3, comb(2, 3, 4, 2)),
        (
            combs.comb(0, steps=4, noise_scale=0.5, size=3, preview="x0"),
            2,
            comb(2, 2, 4, 3, baseline=False),
        ),
    ],
)
def test_forests_are_the_engines(plan: Plan, size: int, expected: Forest) -> None:
    """Same nodes with the same ids; the noise itself is not compared."""
    (got, leaf), (wanted, wanted_leaf) = grown(plan, size), expected
    assert torch.equal(got.parent, wanted.parent) and torch.equal(got.step, wanted.step)
    assert torch.equal(got.group, wanted.group) and torch.equal(got.std > 0, wanted.std > 0)
    assert sorted(leaf.tolist()) == sorted(wanted_leaf.tolist())


def test_a_last_draw_without_std_is_no_decision() -> None:
    """CPS into sigma 0: the reference's 0/0 step. Its node is the finished sample of the decision
    before."""
    got, leaf = grown(combs.comb(0, steps=3, noise_scale=0.5, size=3, baseline=True), 2, cps)
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
    (parent, _, std, _), _ = forest
    above = ancestry(forest[0])
    for v in range(len(parent)):
        path = [v]
        while parent[path[-1]] >= 0:
            path.append(int(parent[path[-1]]))
        noisy = [u for u in path if std[u] > 0]
        expected = (path[-1], len(noisy), noisy[0] if noisy else -1)
        assert (int(above.root[v]), int(above.depth[v]), int(above.decision[v])) == expected


def chain_of(tree_: Tree, root: int) -> list[int]:
    """Follow the only decisions below a root, by looking for children."""
    out: list[int] = []
    at = root
    while True:
        below = [v for v in range(len(tree_.parent)) if tree_.parent[v] == at and tree_.std[v] > 0]
        if not below:
            return out
        (at,) = below
        out.append(at)


@given(random_comb(), SEED)
@settings(max_examples=60, deadline=None)
def test_combs_are_read_in_any_order_of_samples(
    drawn: tuple[Forest, dict[str, object]], seed: int
) -> None:
    """Oracle: from each root down by looking for children, in Python."""
    ((nodes, leaf), _, _), options = reordered(drawn[0], seed), drawn[1]
    found = comb_of("credit", leaf, nodes, baseline=True)
    roots = [v for v in range(len(nodes.parent)) if nodes.parent[v] < 0]
    assert found.decision.tolist() == [chain_of(nodes, root) for root in roots]
    for row, root in enumerate(roots):
        seen = [root, *found.decision[row].tolist()]
        places = [found.start[row], *found.seen[row]]
        for node, place in zip(seen, places, strict=True):
            own = [
                v
                for v in leaf.tolist()
                if v == node or (nodes.parent[v] == node and nodes.std[v] == 0)
            ]
            assert int(leaf[place]) == max(own)
    assert options["window"] - found.decision.shape[1] in (0, 1)  # type: ignore[operator]


@given(random_rake(), SEED)
@settings(max_examples=60, deadline=None)
def test_rakes_are_read_in_any_order_of_samples(
    drawn: tuple[Forest, dict[str, object]], seed: int
) -> None:
    (nodes, leaf), _, _ = reordered(drawn[0], seed)
    found = rake_of("credit", leaf, nodes)
    assert found.decision.tolist() == [v for v in range(len(nodes.std)) if nodes.std[v] > 0]
    for node, places in zip(found.decision.tolist(), found.seen, strict=True):
        below = sorted(v for v in leaf.tolist() if nodes.parent[v] == node)
        assert leaf[places].tolist() == (below or [node] * found.seen.shape[1])


def test_spread_gives_a_image_the_weight_of_its_draw() -> None:
    nodes, leaf = comb(1, 1, 3, 2)  # root, baseline, draw 1, preview, draw 2, finished
    found = comb_of("credit", leaf, nodes, baseline=True)
    weight = spread(torch.tensor([[2.0, float("nan")]], dtype=torch.float64), found.owner)
    assert weight.dtype == torch.float32
    assert weight.tolist() == [0, 0, 2, 2, 0, 0]


def without(forest: Forest, *places: int) -> Forest:
    """Forget leaves."""
    nodes, leaf = forest
    return nodes, leaf[[i for i in range(len(leaf)) if i not in places]]


@pytest.mark.parametrize(
    ("forest", "words"),
    [
        (tree(1, 2, 3, [1]), "10 draws under 2 initial noises, at most 3 in a row"),
        (tree(1, 1, 3, [0]), "6 draws under 1 initial noises"),
        (rake(1, 1, 3, 2, high=2), "4 draws under 1 initial noises, at most 1 in a row"),
        (comb(1, 2, 1, 1, flat_end=True), "0 draws under 2 initial noises, at most 0 in a row"),
        (
            chain(1, 2, 3),
            "no image without noise under some initial noises and no preview under some draws",
        ),
        (
            comb(1, 2, 3, 3, baseline=False),
            "got no image without noise under some initial noises. Use",
        ),
        (
            without(comb(1, 2, 3, 3), 0),
            "got no image without noise under some initial noises. Use",
        ),
        (without(comb(1, 2, 3, 3), 4), "got no preview under some draws. Use"),
        (without(comb(1, 2, 3, 3), 7), "got no finished image at the end of some chains. Use"),
    ],
)
def test_what_is_no_comb_is_refused_by_what_is_missing(forest: Forest, words: str) -> None:
    with pytest.raises(ConfigError, match=r"plan: \{fn: comb, baseline: true, \.\.\.\}") as caught:
        comb_of("my_credit", forest[1], forest[0], baseline=True)
    assert str(caught.value).startswith("my_credit: expected one chain") and words in str(
        caught.value
    )


def test_a_second_preview_is_refused() -> None:
    nodes, leaf = comb(1, 1, 3, 3)
    first = int(nodes.parent[leaf[1]])
    more = [
        torch.cat([row, torch.tensor([value])])
        for row, value in zip(nodes, (first, 3, 0.0, 0), strict=True)
    ]
    with pytest.raises(ConfigError, match="several previews under some draws"):
        comb_of(
            "credit",
            torch.cat([leaf, torch.tensor([len(nodes.parent)])]),
            Tree(*more),
            baseline=True,
        )


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
    from flowrl.config.axes import AXES
    from flowrl.config.calls import offers

    assert not [path for path in offers(AXES["credit"], "here") if "._chains." in path]
