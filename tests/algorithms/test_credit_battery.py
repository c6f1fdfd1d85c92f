"""Every credit against plain Python and what all of them promise, on random forests."""

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
from slowcredits import (
    fused_below,
    mean_below,
    slow_anchored,
    slow_granular,
    slow_group,
    slow_nodes,
    slow_turning,
)
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm, sibling_norm
from flowrl.algorithms.credit.comparisons import best_worst
from flowrl.algorithms.credit.single_draws import granular_norm, turning_point, value_anchored
from flowrl.algorithms.forest import subtree_mean, subtree_softmax
from flowrl.core.errors import ConfigError

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
