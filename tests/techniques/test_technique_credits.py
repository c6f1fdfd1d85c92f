"""Credits that compare a prompt's images: numbers of the reference's fixtures (computed in numpy
from published code or formulas), and what scaling, shifting, equal and missing rewards do."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any, NamedTuple

import forests
import pytest
import torch
from groupkit import drawn, images
from torch import Tensor

from flowrl.algorithms.credit.advantages import group_norm, mean_centred, signed_power
from flowrl.core.errors import ConfigError
from flowrl.techniques.group_credits import (
    beta_norm,
    consistency_blend,
    difficulty_balanced,
    median_norm,
    unlikely_norm,
    virtual_best,
)

NAN = float("nan")
LOGS = torch.linspace(-2, -1, 24)


class Rule(NamedTuple):
    """A credit, and what changes its advantages."""

    credit: Callable[..., Tensor]
    options: dict[str, Any]
    scales: bool | None  # a factor leaves them as they are; None: they are only scaled
    shifts: bool  # so does a constant
    sums: bool = False  # those of a prompt add up to 0
    flat: bool = True  # a prompt of equal rewards has none


RULES = {
    "group": Rule(group_norm, {"eps": 0.0}, True, True, sums=True),
    "global": Rule(group_norm, {"eps": 0.0, "std": "global"}, True, True, sums=True),
    "Dr.GRPO": Rule(mean_centred, {}, None, True, sums=True),
    "MC-GRPO": Rule(median_norm, {"eps": 1e-9}, True, True),
    "NGRPO": Rule(virtual_best, {"best": 2.0}, False, False, flat=False),
    "BNPO": Rule(beta_norm, {}, False, False, sums=True),  # weighs centred rewards alike
    "A-GRAE": Rule(difficulty_balanced, {}, False, False),
    "SLAS": Rule(signed_power, {}, True, True),
    "COPO": Rule(consistency_blend, {"eps": 1e-9}, True, True, flat=False),
    "unlikely": Rule(
        unlikely_norm, {"eps": 1e-9, "log_prob": LOGS}, True, False, sums=True, flat=False
    ),
}
battery = pytest.mark.parametrize("name", RULES)
REWARDS = [[0.3, 0.9, 0.4, 0.1], [0.2, 0.3, 0.7, 0.6], [0.5, 0.5, 0.5, 0.5]]


@battery
def test_what_scaling_and_shifting_rewards_does(name: str) -> None:
    """Rewards times 1/2, and plus 1/16: what should not change does not, what should does."""
    rule = RULES[name]
    reward, *rest = drawn(REWARDS)
    before, half, more = (
        rule.credit(r, *rest, **rule.options) for r in (reward, reward / 2, reward + 1 / 16)
    )
    if rule.scales is None:
        torch.testing.assert_close(half, before / 2)
    else:
        assert torch.allclose(half, before, atol=2e-5) == rule.scales
    assert torch.allclose(more, before, atol=2e-5) == rule.shifts


@battery
def test_sums_of_a_prompt_and_equal_rewards(name: str) -> None:
    """Centred advantages add up to 0. The third prompt's images are equal: exactly no advantage,
    but for NGRPO, COPO and the unlikely one, which exist to give it one."""
    rule = RULES[name]
    found = images(rule.credit, *drawn(REWARDS), **rule.options)
    assert (found[8:] == [0] * 4) == rule.flat
    sums = [sum(found[first : first + 4]) for first in (0, 4, 8)]
    if rule.sums:
        assert sums == pytest.approx([0] * 3, abs=1e-5)


@pytest.mark.parametrize("name", [n for n in RULES if n not in ("COPO", "unlikely", "strata")])
def test_what_was_not_scored_has_no_advantage_and_changes_no_other(name: str) -> None:
    credit, options = RULES[name][:2]
    whole = images(credit, *drawn([[0.2, 0.9, 0.4], [1.0, 0.0, 0.3]]), **options)
    laid = drawn([[0.2, NAN, 0.9, 0.4], [1.0, 0.0, 0.3], [NAN, NAN]])
    holed = images(credit, *laid, **options)
    assert [holed.pop(place) for place in (8, 7, 1)] == [0, 0, 0]
    assert holed == pytest.approx(whole, rel=1e-5)


# success rates .25 .75 .5 .25
FOUR: list[list[float]] = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
MEDIAN = [-0.996678, 1.328904, 0, 0.166113, -1.328904]
FIXTURES: list[tuple[Callable[..., Tensor], dict[str, Any], list[list[float]], list[float]]] = [
    (mean_centred, {}, [[0.2, 0.8], [0.5, 0.5]], [-0.3, 0.3, 0, 0]),
    (mean_centred, {"lower": 0.1}, [[0.2, 0.8]], [-0.2, 0.4]),
    # P3O (2310.00212) without clipping, (r_1 - r_2) grad (l_1 - l_2) / 2
    (mean_centred, {}, [[0.9, 0.2]], [0.35, -0.35]),
    (median_norm, {}, [[0.2, 0.9, 0.5, 0.55, 0.1]], MEDIAN),
    (virtual_best, {}, [[0, 0, 0, 0]], [-0.447213] * 4),
    (virtual_best, {}, [[0, 1, 0, 1]], [-1.095443, 0.730295] * 2),
    (virtual_best, {}, [[1.0, 1.0]], [0, 0]),
    (beta_norm, {}, FOUR, [0.630577, -0.210192, -0.210192, -0.210192]),
    (difficulty_balanced, {}, FOUR, [0.656247, -0.499998, -0.499998, -0.499998]),
    (difficulty_balanced, {}, [FOUR[1], FOUR[0], *FOUR[2:]], [*[0.514467] * 3, -3.527773]),
    # .3535534 .0894427 -.0316228 -.4647580 over their mean magnitude .2348442
    (signed_power, {}, [[1.5, 1.2, 0.9, 0.4]], [1.505481, 0.380860, -0.134654, -1.978998]),
]


@pytest.mark.parametrize(("credit", "options", "rewards", "wanted"), FIXTURES)
def test_advantages_are_those_of_the_fixtures(
    credit: Callable[..., Tensor], options: Any, rewards: Any, wanted: list[float]
) -> None:
    found = images(credit, *drawn(rewards), **options)[: len(wanted)]
    assert found == pytest.approx(wanted, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize(
    ("credit", "rewards", "options", "words"),
    [
        (virtual_best, [[0.5, 1.5]], {}, "best=1.0 has to be the highest"),
        (virtual_best, [[0.5, 1.0]], {"count": 0}, "count >= 1"),
        (beta_norm, [[-0.1, 1.0]], {}, "rewards from 0 to 1, got -0.1 to 1"),
        (difficulty_balanced, [[0.5, 2.0]], {}, "rewards from 0 to 1"),
        (difficulty_balanced, [[0.5]], {"damp": 0.0}, "damp > 0"),
        (median_norm, [[0.5]], {"eps": 0.0}, "eps > 0"),
        (signed_power, [[0.5]], {"gamma": -1.0}, "gamma > -1"),
        (unlikely_norm, [[-1, 1]], {"log_prob": torch.zeros(4)}, "rewards from 0 on"),
    ],
)
def test_bad_rewards_and_options_are_named(
    credit: Callable[..., Tensor], rewards: Any, options: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        credit(*drawn(rewards), **options)


# -------------------------------------------------------------- those that look at more, by hand


def z(values: list[float]) -> list[float]:
    """Standardise with n - 1."""
    return [(value - mean(values)) / (stdev(values) + 1e-6) for value in values]


def test_likely_images_are_paid_less() -> None:
    """Of log-probs -3 -1 -2 -5 the ranks are 1 3 2 0: factors 1 - rank / 16; an image without a
    score takes no rank."""
    log_prob = torch.tensor([0, 0, 0, 0, -3, -1, -2, -5.0])
    wanted = z([15 / 16, 13 / 16, 14 / 16, 0.0])
    found = images(unlikely_norm, *drawn([[1, 1, 1, 0]]), log_prob=log_prob)
    assert found == pytest.approx(wanted, abs=1e-6)
    more = torch.tensor([0, 0, 0, 0, 0, -3, -1, -9, -2, -5.0])
    found = images(unlikely_norm, *drawn([[1, 1, NAN, 1, 0]]), log_prob=more)
    assert found.pop(2) == 0 and found == pytest.approx(wanted, abs=1e-6)


def test_prompts_that_agree_are_compared_with_other_prompts() -> None:
    """One prompt half right (one bit), one all right: own z scores of the first, w = sigmoid(10);
    the second has none, so only its place among the prompts, where means .5 and 1 are apart by
    1 / sqrt 2 standard deviations each."""
    found = images(consistency_blend, *drawn([[1, 1, 0, 0], [1, 1, 1, 1]]))
    w, among = 1 / (1 + math.exp(-10)), z([0.5, 1.0])
    own = z([1, 1, 0, 0])
    assert found[:4] == pytest.approx([w * a + (1 - w) * among[0] for a in own], abs=1e-5)
    assert found[4:] == pytest.approx([among[1]] * 4, abs=1e-5)
    # with the discount 1 - H (1 - 1/4) / 2 a prompt that agrees on wrong is above one that is torn
    torn = drawn([[1, 0, 0, 0], [0.2, 0.2, 0.2, 0.2], [1, 1, 1, 1]])
    bits = 0.75 * math.log2(4 / 3) + 0.25 * 2
    worth = [0.25 * (1 - bits * 0.375), 0.2, 1.0]
    last = images(consistency_blend, *torn, discount=True)
    assert [last[4], last[8]] == pytest.approx(z(worth)[1:], abs=1e-5)


def test_salt_gives_a_shared_step_the_mean_of_those_that_share_it() -> None:
    """Two noises with a draw each, then two draws below each of these, and one below each of those:
    of rewards 0 1 1 4 (mean 1.5, std 1.5) a draw that two images share has the mean of their
    advantages, what follows has its image's own."""
    tree, leaf = forests.tree(1, 2, 4, splits=(1,), ode_last=1)
    found = group_norm(torch.tensor([0.0, 1.0, 1.0, 4.0]), leaf, tree, eps=0.0)
    own = [-1, -1 / 3, -1 / 3, 5 / 3]
    by_step = [found[(tree.step == step) & (tree.std > 0)].tolist() for step in (1, 2, 3)]
    assert by_step[0] == pytest.approx([-2 / 3, 2 / 3])
    assert by_step[1] == by_step[2] == pytest.approx(own)
    # what the whole group shares says nothing of any image
    tree, leaf = forests.tree(1, 1, 4, splits=(1, 2), ode_last=1)
    whole = group_norm(torch.tensor([0.1, 0.7, 0.3, 0.4]), leaf, tree)
    assert whole[tree.step == 1].tolist() == pytest.approx([0.0], abs=1e-15)
    assert float(whole[tree.step == 2].abs().min()) > 0.1
