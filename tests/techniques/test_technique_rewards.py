"""Rewards of techniques: what depends on another reward or on how training goes, and verdicts that
err."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from groupkit import drawn, images
from mixkit import batch, close, same, scores
from torch import Tensor

from flowrl.algorithms.credit import advantages
from flowrl.core.errors import ConfigError
from flowrl.core.types import Scores
from flowrl.techniques import reward_mixes
from flowrl.techniques.reward_mixes import constrained
from flowrl.techniques.verdicts import noisy_backward, noisy_forward

NAN = float("nan")


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mixed(reward_mixes.conditional, {"r": [[0.0]]}, by="q"), "no reward 'q'"),
        (lambda: mixed(reward_mixes.conditional, {"r": [[0.0]]}, by="r", inter=2.0), "inter"),
        (lambda: constrained(at_least={"z": 1.0})(scores({"a": [1.0]}, [1]), same), "reward 'z'"),
        (lambda: constrained(at_least={}), "at_least"),
        (lambda: constrained(at_least={"a": 1.0}, lr=0.0), "lr > 0"),
    ],
)
def test_what_cannot_be_is_named(call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


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
    found = aggregate(low, same)
    close(found, [1 + 0.2 * 0.1, 2 + 0.2 * 0.3])
    assert found.metrics == pytest.approx({"slack/b": -0.4, "dual/b": 0.2})
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


def test_noisy_verdicts_are_the_published_numbers() -> None:
    """Fixture with rho0 = .1, rho1 = .2: backward -.142857, 1.285714; forward -.8, .2."""
    values = torch.tensor([0.0, 1.0, NAN])
    got = noisy_backward(values, batch([0] * 3), false_accept=0.1, false_refusal=0.2)
    torch.testing.assert_close(got, torch.tensor([-1 / 7, 9 / 7, NAN]), equal_nan=True)
    got = noisy_forward(values, batch([0] * 3), false_refusal=0.2)
    torch.testing.assert_close(got, torch.tensor([-0.8, 0.2, NAN]), equal_nan=True)


@pytest.mark.parametrize("truth", [0.0, 1.0])
def test_backward_is_unbiased_and_forward_scales(truth: float) -> None:
    """The expectation over the verifier's errors, written out: the truth itself, and -(1 - rho0 -
    rho1)(1 - truth)."""
    rho0, rho1 = 0.15, 0.3
    ones = 1 - rho1 if truth else rho0  # P(verdict 1)
    verdicts, chance = torch.tensor([0.0, 1.0]), torch.tensor([1 - ones, ones])
    two = batch([0, 0])
    backward = noisy_backward(verdicts, two, false_accept=rho0, false_refusal=rho1)
    forward = noisy_forward(verdicts, two, false_refusal=rho1)
    assert float((chance * backward).sum()) == pytest.approx(truth, abs=1e-6)
    assert float((chance * forward).sum()) == pytest.approx(
        -(1 - rho0 - rho1) * (1 - truth), abs=1e-6
    )


def test_rates_by_tag() -> None:
    got = noisy_forward(
        torch.tensor([1.0, 1.0]),
        batch([0, 1], ["ocr", "count"]),
        false_refusal={"ocr": 0.1, "count": 0.4},
    )
    torch.testing.assert_close(got, torch.tensor([0.1, 0.4]))
    with pytest.raises(ConfigError, match=r"tags without: \['count'\]"):
        noisy_forward(
            torch.tensor([1.0, 1.0]), batch([0, 1], ["ocr", "count"]), false_refusal={"ocr": 0.1}
        )


def test_what_is_no_verdict_is_refused() -> None:
    with pytest.raises(ConfigError, match="verdicts 0 or 1, got 0.5"):
        noisy_forward(torch.tensor([0.5]), batch([0]), false_refusal=0.1)
    with pytest.raises(ConfigError, match="below 1"):
        noisy_backward(torch.tensor([1.0]), batch([0]), false_accept=0.5, false_refusal=0.5)
    with pytest.raises(ConfigError, match=r"in \[0, 1\)"):
        noisy_forward(torch.tensor([1.0]), batch([0]), false_refusal=1.5)
