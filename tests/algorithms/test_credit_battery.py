"""Every credit against plain Python and what all of them promise, on random forests; chains and
draws are found in any order of nodes, in forests as the engine grows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from forests import (
    Forest,
    chain,
    comb,
    edges,
    rake,
    random_comb,
    random_forest,
    random_rake,
    reordered,
    rewards,
    tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import run
from slowcredits import (
    samples,
    slow_anchored,
    slow_best_worst,
    slow_granular,
    slow_group,
    slow_nodes,
    slow_turning,
    up,
)
from torch import Tensor

from flowrl.algorithms.credit._chains import ancestry, comb_of, rake_of, spread_to_nodes
from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.credit.comparisons import best_worst
from flowrl.algorithms.credit.single_draws import granular_norm, turning_point, value_anchored
from flowrl.algorithms.plans import trees
from flowrl.algorithms.plans import windows as plans
from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.config.axes import AXES
from flowrl.config.calls import offers
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan, Transition, Tree

SEED = st.integers(0, 10**6)
COMBS = random_comb().map(lambda drawn: drawn[0])
RAKES = random_rake().map(lambda drawn: drawn[0])
NORM = {"eps": st.just(1e-3), "ddof": st.sampled_from([0, 1])}
SOFTMAX = {"fusion": st.just("softmax"), "temperature": st.sampled_from([0.5, 1.0, 7.0])}
TURN = {"strict": st.booleans(), "balance": st.booleans()}
ANCHOR = {
    "gamma": st.sampled_from([0.0, 0.7, 1.0]),
    "k": st.just(0.3),
    "anchored_steps": st.integers(0, 3),
    "direction": st.sampled_from(["future", "past"]),
}


class Case(NamedTuple):
    """A credit, the forests that it takes, its options and its oracle."""

    credit: Callable[..., Tensor]
    forests: st.SearchStrategy[Forest]
    options: dict[str, st.SearchStrategy[Any]]
    slow: Callable[..., list[float]]


def nodes_by(family: str) -> Callable[..., list[float]]:
    return lambda *arguments, **options: slow_nodes(*arguments, family=family, **options)


CASES = {
    "group": Case(group_norm, random_forest(), NORM, slow_group),
    "global": Case(group_norm, random_forest(), NORM | {"std": st.just("global")}, slow_group),
    "depth": Case(depth_norm, random_forest(), NORM, nodes_by("step")),
    "softmax": Case(depth_norm, random_forest(), NORM | SOFTMAX, nodes_by("step")),
    "sibling": Case(sibling_norm, random_forest(), NORM, nodes_by("parent")),
    "granular": Case(granular_norm, RAKES, NORM, slow_granular),
    "turning": Case(turning_point, COMBS, NORM | TURN, slow_turning),
    "anchored": Case(value_anchored, COMBS, NORM | ANCHOR, slow_anchored),
    "best_worst": Case(best_worst, random_forest(), {}, slow_best_worst),
}


def credit(name: str, forest: Forest, reward: Tensor, options: dict[str, Any]) -> Tensor:
    return CASES[name].credit(reward, forest[1], forest[0], **options)


@pytest.mark.parametrize("name", CASES)
@given(st.data(), SEED, st.sampled_from([0, 3]), st.sampled_from([0.0, 0.2, 1.0]))
@settings(max_examples=80, deadline=None)
def test_advantages_are_the_slow_ones(
    name: str, data: st.DataObject, seed: int, kinds: int, missing: float
) -> None:
    """Oracle: tests/kits/slowcredits.py, plain Python; rewards with ties and NaN, or NaN alone;
    samples and leaves in any order. So no prompt is compared with another, and what is compared
    adds up as the oracle's does."""
    case = CASES[name]
    forest, _, _ = reordered(data.draw(case.forests), seed)
    options = {key: data.draw(value) for key, value in case.options.items()}
    if name == "softmax":
        options["log_prob"] = edges(forest[0], seed)
    reward = rewards(len(forest[1]), seed, kinds=kinds, missing=missing)
    got = credit(name, forest, reward, options)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(case.slow(forest, reward, **options), abs=2e-5, rel=1e-5)


@pytest.mark.parametrize("name", CASES)
@given(st.data(), st.sampled_from([0.1, 26.73, 1 / 3]), st.sampled_from([0.0, 1e-8]))
@settings(max_examples=20, deadline=None)
def test_equal_rewards_of_a_prompt_give_exactly_no_advantage(
    name: str, data: st.DataObject, value: float, eps: float
) -> None:
    """Each prompt has its own value; no rounding may show. VGPO is silent without its anchor."""
    nodes, leaf = data.draw(CASES[name].forests)
    options = {key: data.draw(one) for key, one in CASES[name].options.items()}
    if name == "softmax":
        options["log_prob"] = edges(nodes, 0)
    options |= {"eps": eps} if "eps" in options else {}
    options |= {"k": 0.0} if "k" in options else {}
    prompts = 1 if name == "global" else 3
    reward = torch.tensor([value, 0.7, 3.1])[nodes.group[leaf] % prompts]
    got = credit(name, (nodes, leaf), reward, options)
    assert torch.equal(got, torch.zeros(len(nodes.std)))


@pytest.mark.parametrize(
    ("function", "forest"),
    [
        (granular_norm, chain(1, 2, 3)),
        (granular_norm, tree(1, 1, 3, [0])),
        (granular_norm, comb(1, 2, 3, 2)),
        (turning_point, chain(1, 2, 3)),
        (turning_point, tree(1, 1, 3, [0])),
        (turning_point, comb(1, 2, 3, 3, baseline=False)),
        (turning_point, rake(1, 1, 3, 2, high=2)),
        (value_anchored, chain(1, 2, 3)),
        (value_anchored, tree(1, 1, 3, [0])),
    ],
)
def test_other_forests_are_refused(function: Any, forest: Forest) -> None:
    """By the credit's own name, with the plan that it needs."""
    plan = {
        granular_norm: "{fn: rake",
        turning_point: "{fn: comb, baseline: true",
        value_anchored: "{fn: comb, ...",
    }[function]
    with pytest.raises(ConfigError, match=f"{function.__name__}: expected .* plan: {plan}"):
        function(torch.zeros(len(forest[1])), forest[1], forest[0])


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
