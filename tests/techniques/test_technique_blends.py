"""Group techniques that look at more than a prompt's mean, by hand or by the reference's
numbers."""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import Any

import forests
import pytest
import torch
from groupkit import drawn, images
from torch import Tensor

from flowrl.algorithms.credit import advantages
from flowrl.algorithms.credit.advantages import group_norm
from flowrl.core.errors import ConfigError
from flowrl.core.types import Scores
from flowrl.techniques import group_credits, reward_mixes
from flowrl.techniques.prompt_histories import shrunken_mean

NAN = float("nan")
F64 = torch.float64


def z(values: list[float]) -> list[float]:
    """Standardise with n - 1."""
    return [(value - mean(values)) / (stdev(values) + 1e-6) for value in values]


# ---------------------------------------------------------------------------------------- credits


def test_likely_images_are_paid_less() -> None:
    """Of log-probs -3 -1 -2 -5 the ranks are 1 3 2 0: factors 1 - rank / 16; an image without a
    score takes no rank."""
    laid = drawn([[1, 1, 1, 0]])
    log_prob = torch.tensor([0, 0, 0, 0, -3, -1, -2, -5.0])
    wanted = z([15 / 16, 13 / 16, 14 / 16, 0.0])
    assert images(group_credits.unlikely_norm, *laid, log_prob=log_prob) == pytest.approx(
        wanted, abs=1e-6
    )
    holed = drawn([[1, 1, NAN, 1, 0]])
    more = torch.tensor([0, 0, 0, 0, 0, -3, -1, -9, -2, -5.0])
    found = images(group_credits.unlikely_norm, *holed, log_prob=more)
    assert found[2] == 0 and [*found[:2], *found[3:]] == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ConfigError, match="rewards from 0 on"):
        images(group_credits.unlikely_norm, *drawn([[-1, 1]]), log_prob=torch.zeros(4))


def test_prompts_that_agree_are_compared_with_other_prompts() -> None:
    """One prompt half right (one bit), one all right: own z scores of the first, w = sigmoid(10);
    the second has none, so only its place among the prompts, where means .5 and 1 are apart by
    1 / sqrt 2 standard deviations each."""
    found = images(group_credits.consistency_blend, *drawn([[1, 1, 0, 0], [1, 1, 1, 1]]))
    w, among = 1 / (1 + math.exp(-10)), z([0.5, 1.0])
    own = z([1, 1, 0, 0])
    assert found[:4] == pytest.approx([w * a + (1 - w) * among[0] for a in own], abs=1e-5)
    assert found[4:] == pytest.approx([among[1]] * 4, abs=1e-5)
    # with the discount 1 - H (1 - 1/4) / 2 a prompt that agrees on wrong is above one that is torn
    torn = drawn([[1, 0, 0, 0], [0.2, 0.2, 0.2, 0.2], [1, 1, 1, 1]])
    bits = 0.75 * math.log2(4 / 3) + 0.25 * 2
    worth = [0.25 * (1 - bits * 0.375), 0.2, 1.0]
    last = images(group_credits.consistency_blend, *torn, discount=True)
    assert [last[4], last[8]] == pytest.approx(z(worth)[1:], abs=1e-5)


def test_strata_are_images_of_one_noise() -> None:
    """Rewards 0 1 and .2 .4: within a noise -1, 1; within the prompt (-.4 .6 -.2 0) over its std
    sqrt(.14); half of each."""
    laid = drawn([[0.0, 1.0, 0.2, 0.4]], noises=2)
    spread = math.sqrt(0.14)
    wanted = [(s + gap / spread) / 2 for s, gap in ((-1, -0.4), (1, 0.6), (-1, -0.2), (1, 0.0))]
    assert images(group_credits.strata_norm, *laid, blend=0.5) == pytest.approx(wanted, abs=1e-4)
    with pytest.raises(ConfigError, match="take a plan that forks"):
        images(group_credits.strata_norm, *drawn([[0.0, 1.0]]), blend=0.5)


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


def test_a_baseline_leans_on_the_past_until_it_is_contradicted() -> None:
    """k 4, spread .5: s = 1/16. Before .5: a mean of .75 is within noise, the baseline stays .5; a
    mean of 1 has D = 3/16, w = 3/4, baseline .875. First visit: the mean."""
    credit = shrunken_mean(rate=0.5)
    credit.start(["a"])

    def gaps(rewards: list[float]) -> list[float]:
        return images(credit, *drawn([rewards]), prompts=["a"] * 4)

    assert gaps([1, 1, 0, 0]) == [0.5, 0.5, -0.5, -0.5]
    credit.update(*drawn([[1, 1, 0, 0]]), prompts=["a"] * 4)
    assert gaps([1, 1, 1, 0]) == [0.5, 0.5, 0.5, -0.5]
    assert gaps([1, 1, 1, 1]) == pytest.approx([0.125] * 4)
    credit.update(*drawn([[1, 1, 1, 1]]), prompts=["a"] * 4)
    assert credit.kept["value"].tolist() == [[0.75]]


def test_a_pair_of_images_is_the_pairwise_policy_gradient() -> None:
    """P3O (2310.00212) without clipping, ``(r_1 - r_2) grad (l_1 - l_2) / 2``: the advantages that
    Dr.GRPO gives a group of two."""
    found = images(advantages.mean_centred, *drawn([[0.9, 0.2]]))
    assert found == pytest.approx([0.35, -0.35])


# ------------------------------------------------------------------------------------- aggregates


def mixed(aggregate: Any, values: dict[str, list[list[float]]], **options: Any) -> Any:
    """Let an aggregator mix rewards, of which the first counts -> what its credit sees, metrics."""
    laid = [drawn(rows) for rows in values.values()]
    _, leaf, tree = laid[0]
    table = {name: row[0] for name, row in zip(values, laid, strict=True)}
    weights = {name: float(not place) for place, name in enumerate(values)}
    seen: list[Tensor] = []

    def credit(reward: Tensor) -> Tensor:
        seen.append(reward)
        return torch.zeros(len(tree.parent))

    found = aggregate(Scores(table, weights, leaf, tree), credit, **options)
    return [round(value, 6) for value in seen[0].tolist()], found.metrics


def test_images_are_compared_across_the_median_and_on_their_side() -> None:
    """CANON by hand: by the metric 2, 1, 3, 4 the sides are {r 0, 1} and {1, 1}, means 1/2 and 1;
    half of each way is r less the mean of all."""
    values = {"r": [[1.0, 0.0, 1.0, 1.0]], "m": [[0.2, 0.1, 0.3, 0.4]]}
    across, metrics = mixed(reward_mixes.conditional, values, by="m", inter=1.0)
    assert across == [0, -1, 0.5, 0.5] and metrics == {"gap/m": 0.5}
    assert mixed(reward_mixes.conditional, values, by="m", inter=0.0)[0] == [0.5, -0.5, 0, 0]
    both = mixed(reward_mixes.conditional, values, by="m")[0]
    assert both == images(advantages.mean_centred, *drawn(values["r"]))
    lonely = mixed(reward_mixes.conditional, {"r": [[1.0, NAN]], "m": [[0.1, 0.2]]}, by="m")[0]
    assert all(math.isnan(value) for value in lonely)


def test_sure_and_right_images_get_the_bonus() -> None:
    """The reference's fixture: mean .65, mean confidence .55, margin .01: 0 .5 0 .5 0 0."""
    values = {"acc": [[1.0, 1.0, 0.0, 1.0, 0.0, 0.9]], "conf": [[0.5, 0.7, 0.9, 0.6, 0.2, 0.4]]}
    found = mixed(reward_mixes.consistency_bonus, values, right="acc", sure="conf")[0]
    assert found == pytest.approx([1, 1.5, 0, 1.5, 0, 0.9])


def test_a_threshold_rises_once_the_model_is_ready() -> None:
    """.3 to .8, first step .15, window 2: two iterations at .5 raise it to .45; the older one is
    forgotten; one at .7 makes the mean .6, .15 above: by .15 x .7 to .555."""
    made = reward_mixes.tightening(reward="r", window=2)
    seen: list[float] = []
    for value in (0.5, 0.5, 0.4, 0.7, 0.7):
        reward, leaf, tree = drawn([[value, value]])
        scores = Scores({"r": reward}, {"r": 1.0}, leaf, tree)
        passed = made(scores, lambda r: r)
        assert passed.advantage.tolist() == [float(value >= made.threshold)] * 2
        made.update(scores)
        seen.append(made.threshold)
    again = reward_mixes.tightening(reward="r", window=2)
    again.load_state_dict(made.state_dict())
    assert (again.threshold, again.hits, again.means) == (made.threshold, made.hits, made.means)
    assert seen == pytest.approx([0.3, 0.45, 0.45, 0.45, 0.555])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mixed(reward_mixes.conditional, {"r": [[0.0]]}, by="q"), "no reward 'q'"),
        (lambda: mixed(reward_mixes.conditional, {"r": [[0.0]]}, by="r", inter=2.0), "inter"),
        (lambda: reward_mixes.tightening(reward="r", start=0.9), "start < target"),
        (lambda: shrunken_mean(rate=0.0), "rate <= 1"),
        (lambda: images(group_credits.strata_norm, *drawn([[1.0]]), blend=2.0), "blend in"),
    ],
)
def test_what_cannot_be_is_named(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
