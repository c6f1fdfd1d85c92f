"""Several rewards made one: each aggregator against the fixture of its source or arithmetic by
hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from forests import by_hand
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm
from flowrl.algorithms.reward_mix.aggregate import (
    advantage_sum,
    gated,
    gdpo,
    log_tame,
    weighted_sum,
)
from flowrl.core.errors import ConfigError
from flowrl.core.types import Credit, Mixed, Scores
from flowrl.techniques.reward_mixes import constrained

NAN = math.nan


def scores(
    values: dict[str, list[float]], weights: list[float], groups: list[int] | None = None
) -> Scores:
    """Give each reward its values [L] and weight; roots are their own leaves, of one prompt."""
    size = len(next(iter(values.values())))
    rows = {name: torch.tensor(row) for name, row in values.items()}
    tree = by_hand([-1] * size, [0] * size, [1.0] * size, groups or [0] * size)
    return Scores(rows, dict(zip(values, weights, strict=True)), torch.arange(size), tree)


def credit_of(s: Scores, **options: Any) -> Credit:
    return lambda reward: group_norm(reward, s.leaf, s.tree, **options)


def same(reward: Tensor) -> Tensor:
    return reward


def close(got: Mixed, expected: list[float]) -> None:
    assert got.advantage.tolist() == pytest.approx(expected, abs=2e-6, nan_ok=True)


TWO = {"a": [1.0, 0, 0, 1, 1, 0], "b": [10.0, 0, 5, 4, 4, 4]}


def test_weighted_sum_adds_what_counts() -> None:
    s = scores({"a": [1.0, 2], "b": [10.0, 30], "watched": [NAN, NAN]}, [2, -0.1, 0])
    mixed = weighted_sum(s, same)
    close(mixed, [2 - 1, 4 - 3])
    assert list(mixed.parts) == ["a", "b"]


def test_advantage_sum_and_gdpo_are_the_published_fixture() -> None:
    """Reference fixture of GDPO, numpy float64: two prompts of three images, weights 1 and 0.5,
    nstd1 + 1e-4."""
    s = scores(TWO, [1, 0.5], [0, 0, 0, 1, 1, 1])
    credit = credit_of(s, ddof=1)
    close(advantage_sum(s, credit), [1.654491, -1.077240, -0.577250, 0.577250, 0.577250, -1.154501])
    close(gdpo(s, credit), [1.482025, -0.964948, -0.517077, 0.517077, 0.517077, -1.034154])


def test_with_one_reward_all_three_agree() -> None:
    """A group-normalised advantage has mean 0; whitening then divides by one number."""
    s = scores({"a": [0.1, 0.4, 0.7, 0.9]}, [1])
    credit = credit_of(s, eps=0.0, ddof=1)
    expected = weighted_sum(s, credit).advantage.tolist()
    close(advantage_sum(s, credit), expected)
    close(gdpo(s, credit, eps=0.0), expected)


@pytest.mark.parametrize(
    ("aggregate", "alike"), [(advantage_sum, True), (gdpo, True), (weighted_sum, False)]
)
def test_weights_of_gdpo_are_relative_importances(aggregate: Any, alike: bool) -> None:
    """Scaling one reward by 1/1000 changes a sum of raw rewards, and no sum of advantages."""
    small = {**TWO, "b": [value / 1000 for value in TWO["b"]]}
    one, two = (scores(rows, [1, 1], [0, 0, 0, 1, 1, 1]) for rows in (TWO, small))
    credit = credit_of(one, eps=0.0)
    first, second = (aggregate(s, credit).advantage for s in (one, two))
    assert torch.allclose(first, second, atol=1e-5) == alike


def test_gdpo_whitens_every_node_alike_and_leaves_unscored_ones_at_zero() -> None:
    """Two prompts: a root with two leaves each; the second leaf of the first prompt is not
    scored."""
    tree = by_hand([-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], group=[0, 1, 0, 0, 1, 1])
    leaf = torch.tensor([2, 3, 4, 5])
    rows = {"a": torch.tensor([1.0, NAN, 3.0, 1.0]), "b": torch.tensor([0.0, NAN, 5.0, 9.0])}
    s = Scores(rows, {"a": 1.0, "b": 0.5}, leaf, tree)
    raw = advantage_sum(s, lambda reward: depth_norm(reward, leaf, tree)).advantage
    white = gdpo(s, lambda reward: depth_norm(reward, leaf, tree)).advantage
    known = raw[torch.tensor([2, 4, 5])].double()
    expected = (raw.double() - known.mean()) / (known.std() + 1e-4)
    expected[3] = 0.0
    torch.testing.assert_close(white, expected.float())


def test_log_tame_is_the_published_fixture() -> None:
    """PaCo's fixture: h = .7071054, .0707105, delta = their mean: only the first is tamed."""
    s = scores({"a": [0.1, 0.9, 0.2, 0.8], "b": [0.5, 0.55, 0.5, 0.45]}, [0.2, 1])
    mixed = log_tame(s, same)
    close(mixed, [0.519062, 0.678371, 0.536464, 0.567557])
    assert mixed.metrics == {"tamed/a": 1.0, "tamed/b": 0.0}
    assert log_tame(s, same, threshold="median").metrics == mixed.metrics
    close(log_tame(s, same, threshold=1.0), weighted_sum(s, same).advantage.tolist())
    assert log_tame(s, same, threshold=0.05).metrics == {"tamed/a": 1.0, "tamed/b": 1.0}


def test_log_tame_refuses_what_has_no_logarithm() -> None:
    s = scores({"a": [-1.0, 5, 0, 0], "b": [0.5, 0.5, 0.5, 0.5]}, [1, 1])
    with pytest.raises(ConfigError, match="'a' gave -1"):
        log_tame(s, same)


def test_gates_open_in_order_of_priority() -> None:
    """By hand: b counts where a > .5, c where a > .5 and b > 2; nothing else gates the gates
    themselves."""
    values = {"c": [1.0, 1, 1, 1], "a": [1.0, 1, 0, 0], "b": [3.0, 1, 3, 1]}
    s = scores(values, [10, 1, 0.1])
    mixed = gated(s, same, above={"a": 0.5, "b": 2.0})
    close(mixed, [1 + 0.3 + 10, 1 + 0.1, 0, 0])
    assert mixed.metrics == {"gate/a": 0.5, "gate/b": 0.5}


def test_a_soft_gate_is_a_sigmoid_and_hardens() -> None:
    s = scores({"a": [0.7, 0.2], "b": [1.0, 1.0]}, [0, 1])
    expected = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(3))]
    close(gated(s, same, above={"a": 0.5}, softness=0.1), expected)
    hard = gated(s, same, above={"a": 0.5}).advantage.tolist()
    close(gated(s, same, above={"a": 0.5}, softness=1e-3), hard)


def test_a_gate_that_was_not_scored_is_neither_open_nor_shut() -> None:
    s = scores({"a": [1.0, NAN, 0.0, 1.0], "b": [1.0, 2.0, 3.0, 4.0]}, [0, 1])
    mixed = gated(s, credit_of(s), above={"a": 0.5})
    known = torch.tensor([1.0, 0.0, 4.0]).double()
    first, *rest = ((known - known.mean()) / (known.std(correction=0) + 1e-4)).tolist()
    close(mixed, [first, 0.0, *rest])


def test_duals_rise_while_a_constraint_is_missed_and_fall_after() -> None:
    """lambda <- clip(lambda + lr (b - mean)): .5 * (.6 - .2) = .2, then .4; then .4 - .5 * .4 = .2;
    then 0."""
    aggregate = constrained(at_least={"b": 0.6}, lr=0.5)
    low = scores({"a": [1.0, 2.0], "b": [0.1, 0.3]}, [1, 0])
    high = scores({"a": [1.0, 2.0], "b": [0.9, 1.1]}, [1, 0])
    close(aggregate(low, same), [1.0, 2.0])
    seen = []
    for s in (low, low, high, high, high):
        aggregate.update(s)
        seen.append(aggregate.dual["b"])
    assert seen == pytest.approx([0.2, 0.4, 0.2, 0.0, 0.0], abs=1e-6)
    aggregate.update(low)
    mixed = aggregate(low, same)
    close(mixed, [1 + 0.2 * 0.1, 2 + 0.2 * 0.3])
    assert mixed.metrics == pytest.approx({"slack/b": -0.4, "dual/b": 0.2})
    again = constrained(at_least={"b": 0.6}, lr=0.5)
    again.load_state_dict(aggregate.state_dict())
    assert again.dual == aggregate.dual


def test_duals_find_the_best_of_a_problem_whose_answer_is_known() -> None:
    """Maximise x subject to 1 - x >= .25, x in [0, 1]: x = .75, and the dual settles at 1."""
    aggregate = constrained(at_least={"b": 0.25}, lr=0.05)
    logit, tail = torch.zeros((), dtype=torch.float64), []
    for step in range(4000):
        x = float(logit.sigmoid())
        aggregate.update(scores({"a": [x], "b": [1 - x]}, [1, 0]))
        slope = 1 - aggregate.dual["b"]  # of a + lambda b in x
        logit = (logit + 0.05 * slope * x * (1 - x) * 4).clamp(-6, 6)
        tail += [(x, aggregate.dual["b"])] if step >= 2000 else []
    mean_x, mean_dual = (sum(column) / len(tail) for column in zip(*tail, strict=True))
    assert mean_x == pytest.approx(0.75, abs=0.02) and mean_dual == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("aggregate", "options", "part"),
    [
        (gated, {"above": {"quality": 1.0}}, "no reward 'quality' .there is: a, b"),
        (gated, {"above": {"a": 1.0}, "softness": -1.0}, "softness >= 0"),
        (gdpo, {"eps": -1.0}, "eps >= 0"),
        (constrained, {"at_least": {"z": 1.0}}, "no reward 'z'"),
        (constrained, {"at_least": {}}, "at_least"),
        (constrained, {"at_least": {"a": 1.0}, "lr": 0.0}, "lr > 0"),
    ],
)
def test_mistakes_name_what_is_wrong(aggregate: Any, options: Any, part: str) -> None:
    s = scores(TWO, [1, 1])
    with pytest.raises(ConfigError, match=part):
        made = aggregate(**options) if aggregate is constrained else partial(aggregate, **options)
        made(s, same)
