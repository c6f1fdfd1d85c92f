"""Transforms of one reward's values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from flowrl.algorithms.reward_mix.transforms import clip, rank, threshold
from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from flowrl.techniques.verdicts import noisy_backward, noisy_forward

NAN = math.nan


def batch(groups: list[int], tags: list[str] | None = None) -> RewardBatch:
    size = len(groups)
    meta: list[dict[str, Any]] = [{"tag": tag} for tag in tags] if tags else [{}] * size
    return RewardBatch(
        torch.zeros(size, 3, 1, 1), [""] * size, torch.tensor(groups), meta, torch.zeros(size)
    )


def test_clip_limits_and_keeps_what_was_not_scored() -> None:
    got = clip(torch.tensor([-2.0, 0.5, 9.0, NAN]), batch([0] * 4), low=-1, high=1)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.5, 1.0, NAN]), equal_nan=True)
    with pytest.raises(ConfigError, match="low < high"):
        clip(torch.zeros(1), batch([0]), low=1, high=1)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.25, 1.0, 7.0, NAN])),
        min_size=1,
        max_size=12,
    )
)
def test_rank_is_scipys_average_rank_within_each_prompt(rows: list[tuple[int, float]]) -> None:
    groups = [g for g, _ in rows]
    values = torch.tensor([v for _, v in rows])
    expected = torch.full_like(values, NAN)
    for g in set(groups):
        mine = torch.tensor([h == g for h in groups]) & ~values.isnan()
        count = int(mine.sum())
        if count:
            ranks = torch.from_numpy(rankdata(values[mine].numpy(), method="average")).float()
            expected[mine] = (ranks - 1) / (count - 1) if count > 1 else 0.5
    torch.testing.assert_close(rank(values, batch(groups)), expected, equal_nan=True)


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


def test_a_threshold_says_yes_or_no() -> None:
    found = threshold(torch.tensor([0.1, 0.28, 0.5, NAN]), batch([0, 0, 0, 0]), at=0.28)
    assert found[:3].tolist() == [0, 1, 1] and bool(found[3].isnan())
