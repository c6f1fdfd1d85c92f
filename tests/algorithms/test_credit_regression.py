"""Credits of losses that imitate: weights of at least 0, by hand and against torch's softmax."""

from __future__ import annotations

import math

import pytest
import torch
from groupkit import drawn, images

from flowrl.algorithms.credit.comparisons import best_of, reward_softmax
from flowrl.core.errors import ConfigError

NAN = math.nan


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_a_softmax_of_each_prompt_with_mean_one(temperature: float) -> None:
    """Oracle: torch's softmax of a prompt's rewards, times their number."""
    rewards = [[0.2, 1.7, -3.0], [5.0, 5.0, 4.0]]
    found = torch.tensor(images(reward_softmax, *drawn(rewards), temperature=temperature))
    wanted = 3 * torch.softmax(torch.tensor(rewards) / temperature, 1)
    assert torch.allclose(found, wanted.flatten(), atol=1e-6)


def test_standardized_weights_know_no_scale() -> None:
    """By hand: the rewards 0, 2, 6 and 10 have the variance 59 / 4, and twice the softmax of two
    numbers that lie d apart is 2 / (1 + exp(-d))."""
    found = images(
        reward_softmax, *drawn([[0.0, 2.0], [6.0, 10.0]]), temperature=1.0, standardize=True
    )
    gaps = [2 / math.sqrt(59 / 4), 4 / math.sqrt(59 / 4)]
    better = [2 / (1 + math.exp(-gap)) for gap in gaps]
    wanted = [2 - better[0], better[0], 2 - better[1], better[1]]
    assert found == pytest.approx(wanted, abs=1e-3)
    larger = drawn([[0.0, 2e3], [6e3, 1e4]])
    scaled = images(reward_softmax, *larger, temperature=1.0, standardize=True)
    assert scaled == pytest.approx(found, abs=1e-3)


def test_what_was_not_scored_has_no_weight() -> None:
    """By hand: two equal images of three count one each, the third nothing; of a prompt without
    any score nothing counts."""
    laid = drawn([[1.0, NAN, 1.0], [NAN, NAN, NAN]])
    assert images(reward_softmax, *laid, temperature=1.0) == [1, 0, 1, 0, 0, 0]
    assert images(best_of, *laid, equal=True) == [1, 0, 0, 0, 0, 0]
    assert images(best_of, *laid) == [0] * 6


@pytest.mark.parametrize(
    ("keep", "equal", "wanted"),
    [
        (1, False, [0, 0, 1, 0, 0, 0]),
        (2, False, [0, 1, 1, 0, 0, 0]),
        (1, True, [0, 0, 1, 1, 0, 0]),
        (2, True, [0, 1, 1, 1, 1, 0]),
        (9, True, [1] * 6),
    ],
)
def test_the_best_of_each_prompt(keep: int, equal: bool, wanted: list[int]) -> None:
    """Prompts with rewards 1, 2, 3 and with three equal ones: these have no best, unless asked."""
    laid = drawn([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    assert images(best_of, *laid, keep=keep, equal=equal) == wanted


def test_numbers_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="expected keep >= 1, got 0"):
        best_of(*drawn([[1.0, 2.0]]), keep=0)
    with pytest.raises(ConfigError, match="expected temperature > 0, got 0"):
        reward_softmax(*drawn([[1.0, 2.0]]), temperature=0.0)
