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
    fused_below,
    mean_below,
    samples,
    slow_anchored,
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
from flowrl.algorithms.forest import subtree_mean, subtree_softmax
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
    """A credit, the forests that it takes, its options, its oracle, and what sums to zero."""

    credit: Callable[..., Tensor]
    forests: st.SearchStrategy[Forest]
    options: dict[str, st.SearchStrategy[Any]]
    slow: Callable[..., list[float]] | None
    compared: str | None  # nodes with equal ones are compared; "leaf": the images of a prompt


def nodes_by(family: str) -> Callable[..., list[float]]:
    return lambda *arguments, **options: slow_nodes(*arguments, family=family, **options)


CASES = {
    "group": Case(group_norm, random_forest(), NORM, slow_group, "leaf"),
    "global": Case(group_norm, random_forest(), NORM | {"std": st.just("global")}, None, "leaf"),
    "depth": Case(depth_norm, random_forest(), NORM, nodes_by("step"), "step"),
    "softmax": Case(depth_norm, random_forest(), NORM | SOFTMAX, nodes_by("step"), "step"),
    "sibling": Case(sibling_norm, random_forest(), NORM, nodes_by("parent"), "parent"),
    "granular": Case(granular_norm, RAKES, NORM, slow_granular, "step"),
    "turning": Case(turning_point, COMBS, NORM | TURN, slow_turning, "step"),
    "anchored": Case(value_anchored, COMBS, NORM | ANCHOR, slow_anchored, None),
    "best_worst": Case(best_worst, random_forest(), {}, None, "leaf"),
}
UNITS = [name for name in CASES if name not in ("global", "granular", "anchored", "best_worst")]
battery = pytest.mark.parametrize("name", CASES)


class Drawn(NamedTuple):
    """A forest with rewards, and the options of one call."""

    forest: Forest
    reward: Tensor
    options: dict[str, Any]
    seed: int


def draw(data: st.DataObject, name: str, *, missing: float = 0.0, kinds: int = 0) -> Drawn:
    case, seed = CASES[name], data.draw(SEED)
    forest = data.draw(case.forests)
    options = {key: data.draw(value) for key, value in case.options.items()}
    if name == "softmax":
        options["log_prob"] = edges(forest[0], seed)
    reward = rewards(len(forest[1]), seed, kinds=kinds, missing=missing)
    return Drawn(forest, reward, options, seed)


def credit(name: str, forest: Forest, reward: Tensor, options: dict[str, Any]) -> Tensor:
    return CASES[name].credit(reward, forest[1], forest[0], **options)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slow])
@given(st.data(), st.sampled_from([0, 3]), st.sampled_from([0.0, 0.2]))
@settings(max_examples=80, deadline=None)
def test_advantages_are_the_slow_ones(
    name: str, data: st.DataObject, kinds: int, missing: float
) -> None:
    """Oracle: tests/kits/slowcredits.py, plain Python; rewards with ties and NaN."""
    forest, reward, options, _ = draw(data, name, missing=missing, kinds=kinds)
    got, slow = credit(name, forest, reward, options), CASES[name].slow
    assert slow is not None and got.dtype == torch.float32
    assert got.tolist() == pytest.approx(slow(forest, reward, **options), abs=2e-5, rel=1e-5)


@given(random_forest(), SEED, st.sampled_from([0.0, 0.3]), st.sampled_from([0.5, 1.0, 7.0]))
@settings(max_examples=80, deadline=None)
def test_values_of_nodes_are_the_recursions(
    forest: Forest, seed: int, missing: float, temperature: float
) -> None:
    """Oracle: walking up from each leaf, and recursion over children; to float64."""
    (nodes, leaf), log_prob = forest, edges(forest[0], seed)
    value = rewards(len(leaf), seed, missing=missing)
    mean = subtree_mean(value, leaf, nodes)
    fused = subtree_softmax(value, leaf, nodes, log_prob, temperature)
    near: dict[str, Any] = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}
    assert mean.tolist() == pytest.approx(mean_below(forest, value), **near)
    wanted = fused_below(forest, value, log_prob, temperature)
    assert fused.tolist() == pytest.approx(wanted, **near)


@battery
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_order_of_samples_and_leaves_does_not_matter(name: str, data: st.DataObject) -> None:
    """All rewards differ, so that nothing ties."""
    forest, reward, options, seed = draw(data, name)
    moved, new, place = reordered(forest, seed)
    other = dict(options)
    if "log_prob" in options:
        other["log_prob"] = torch.empty_like(options["log_prob"])
        other["log_prob"][new] = options["log_prob"]
    got = credit(name, moved, reward[place], other)[new]
    torch.testing.assert_close(got, credit(name, forest, reward, options), rtol=1e-4, atol=1e-5)


@battery
@given(st.data(), st.sampled_from([0.1, 26.73, 1 / 3]), st.sampled_from([0.0, 1e-8]))
@settings(max_examples=30, deadline=None)
def test_equal_rewards_of_a_prompt_give_exactly_no_advantage(
    name: str, data: st.DataObject, value: float, eps: float
) -> None:
    """Each prompt has its own value; no rounding may show. VGPO is silent without its anchor."""
    (nodes, leaf), _, options, _ = draw(data, name)
    options |= {"eps": eps} if "eps" in options else {}
    options |= {"k": 0.0} if "k" in options else {}
    prompts = 1 if name == "global" else 3
    reward = torch.tensor([value, 0.7, 3.1])[nodes.group[leaf] % prompts]
    got = credit(name, (nodes, leaf), reward, options)
    assert torch.equal(got, torch.zeros(len(nodes.std)))


def sums(name: str, forest: Forest, weight: Tensor) -> list[Tensor]:
    """Return the advantages of each set of nodes that are compared with each other."""
    nodes, leaf = forest
    family = CASES[name].compared
    if family == "leaf":
        return [weight[leaf[nodes.group[leaf] == g]] for g in nodes.group.unique()]
    keys = torch.stack([nodes.group, getattr(nodes, family or ""), (nodes.std > 0).long()])
    if CASES[name].credit in (granular_norm, turning_point):  # an image has its draw's advantage
        keys = keys[:, nodes.std > 0]
        weight = weight[nodes.std > 0]
    return [weight[(keys == row[:, None]).all(0)] for row in torch.unique(keys, dim=1).T]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compared])
@given(st.data(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_advantages_of_what_is_compared_sum_to_zero(
    name: str, data: st.DataObject, missing: float
) -> None:
    """With eps 0 the std is 1, or all are 0 (closed form of a z-score)."""
    forest, reward, options, _ = draw(data, name, missing=missing)
    options |= {"eps": 0.0} if "eps" in options else {}
    for mine in sums(name, forest, credit(name, forest, reward, options).double()):
        assert float(mine.sum()) == pytest.approx(0, abs=1e-4)
        if name in UNITS and not missing:
            ddof = options["ddof"]
            spread = float(mine.std(correction=ddof)) if len(mine) > ddof else 0.0
            assert spread == pytest.approx(1, abs=1e-3) or mine.tolist() == [0] * len(mine)


@battery
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_unscored_images_never_show_and_alone_give_nothing(name: str, data: st.DataObject) -> None:
    forest, reward, options, _ = draw(data, name, missing=0.4)
    assert bool(credit(name, forest, reward, options).isfinite().all())
    nothing = credit(name, forest, torch.full_like(reward, torch.nan), options)
    assert torch.equal(nothing, torch.zeros(len(forest[0].std)))


@pytest.mark.parametrize("name", [name for name in CASES if name != "global"])
@given(st.data())
@settings(max_examples=30, deadline=None)
def test_one_prompt_is_not_compared_with_another(name: str, data: st.DataObject) -> None:
    """Other rewards of prompt 0 change no advantage of the others, to the bit."""
    forest, reward, options, _ = draw(data, name)
    nodes, leaf = forest
    options |= {"balance": False} if "balance" in options else {}
    changed = torch.where(nodes.group[leaf] == 0, 64 * reward.flip(0), reward)
    one, two = (credit(name, forest, value, options) for value in (reward, changed))
    assert torch.equal(one[nodes.group > 0], two[nodes.group > 0])


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
