"""Dynamic clip bounds and the pull towards the best leaf."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losskit import on_tensors
from torch import Tensor

from flowrl.algorithms.losses import dynamic, policy
from flowrl.core.errors import ConfigError

dynamic_clip = on_tensors(dynamic.dynamic_clip)
ppo_clip = on_tensors(policy.ppo_clip)
COUNT = 40


def inputs(spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    old, step, weight = (torch.randn(COUNT, generator=g, dtype=torch.float64) for _ in range(3))
    return (old + spread * step).requires_grad_(), old, weight


def states(seed: int = 1) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    v, x, best = (torch.randn(COUNT, 3, 2, generator=g, dtype=torch.float64) for _ in range(3))
    sigma, weight = (
        torch.linspace(1, 0.05, COUNT, dtype=torch.float64),
        torch.randn(COUNT, generator=g),
    )
    return {
        "v": v.requires_grad_(),
        "x": x,
        "sigma": sigma,
        "best_x0": best,
        "best_advantage": weight.double(),
    }


@pytest.mark.parametrize("segment", [None, torch.arange(COUNT) // 3], ids=["steps", "chunks"])
def test_without_eta_and_sft_it_is_ppo_with_the_middle_range(segment: Tensor | None) -> None:
    """Value, gradient and metrics to the bit; (1/8 + 1/4) / 2 = 3/16 is exact in binary."""
    log_prob, old, weight = inputs()
    plain, wanted = ppo_clip(
        log_prob, old, weight, clip_low=3 / 16, clip_high=3 / 16, segment=segment
    )
    got, metrics = dynamic_clip(
        log_prob, old, weight, clip_min=1 / 8, clip_max=1 / 4, eta=0.0, segment=segment, **states()
    )
    assert torch.equal(got, plain) and 0 < float(metrics["clip_frac"].mean()) < 1
    gradients = [torch.autograd.grad(loss.sum(), log_prob)[0] for loss in (got, plain)]
    assert torch.equal(*gradients)
    assert all(torch.equal(metrics[name], value) for name, value in wanted.items())
    assert (
        metrics["clip_range"].tolist() == [3 / 16] * COUNT
        and metrics["sft"].tolist() == [0] * COUNT
    )


def test_bounds_by_hand() -> None:
    """e = .1 + .2 / (1 + exp(-eta A)), A cut at 5; each row against ppo_clip with that very
    range."""
    log_prob, old, weight = inputs()
    weight = 4 * weight
    loss, metrics = dynamic_clip(
        log_prob, old, weight, clip_min=0.1, clip_max=0.3, eta=0.5, **states()
    )
    cut = [max(-5.0, min(5.0, a)) for a in weight.tolist()]
    wanted = [0.1 + 0.2 / (1 + math.exp(-0.5 * a)) for a in cut]
    assert 5 in cut and -5 in cut and metrics["clip_range"].tolist() == pytest.approx(wanted)
    for row, e in enumerate(wanted):
        one = ppo_clip(
            log_prob[row : row + 1],
            old[row : row + 1],
            weight[row : row + 1],
            clip_low=e,
            clip_high=e,
        )
        assert float(loss[row].detach()) == pytest.approx(float(one[0].detach()))
        assert float(metrics["clip_frac"][row]) == float(one[1]["clip_frac"])


@settings(deadline=None, max_examples=60)
@given(
    st.floats(-9, 9), st.floats(-9, 9), st.floats(-20, 20), st.floats(0.001, 0.5), st.floats(0, 0.5)
)
def test_bounds_stay_within_their_limits_and_follow_the_advantage(
    a: float, b: float, eta: float, low: float, more: float
) -> None:
    zero, state = (
        torch.zeros(2, dtype=torch.float64),
        {k: value[:2] for k, value in states().items()},
    )
    weight = torch.tensor([min(a, b), max(a, b)], dtype=torch.float64)
    _, metrics = dynamic_clip(
        zero, zero, weight, clip_min=low, clip_max=low + more, eta=eta, **state
    )
    first, second = metrics["clip_range"].tolist()
    assert low <= first <= low + more + 1e-12 and low <= second <= low + more + 1e-12
    assert (second >= first) if eta >= 0 else (second <= first)


def test_pull_towards_the_best_leaf() -> None:
    """Value and gradient by the formula, on top of the clipped loss; gradient reaches v only."""
    log_prob, old, weight = inputs()
    state = states()
    others = [state[name].requires_grad_() for name in ("x", "best_x0", "best_advantage")]
    options: dict[str, Any] = {"clip_min": 0.1, "clip_max": 0.3, "eta": 1.0}
    plain, _ = dynamic_clip(log_prob, old, weight, **options, **state)
    loss, metrics = dynamic_clip(log_prob, old, weight, **options, sft=0.4, **state)
    path = (state["x"] - state["best_x0"]) / state["sigma"][:, None, None]
    scale = 0.4 / (1 + torch.exp(-state["best_advantage"]))
    wanted = (scale * (state["v"] - path).square().sum((1, 2)) / 6).detach()
    torch.testing.assert_close((loss - plain).detach(), wanted)
    torch.testing.assert_close(metrics["sft"], wanted)
    loss.sum().backward()
    assert state["v"].grad is not None and all(tensor.grad is None for tensor in others)
    torch.testing.assert_close(
        state["v"].grad, (scale[:, None, None] * 2 * (state["v"] - path) / 6).detach()
    )


def test_the_velocity_of_the_straight_path_is_not_pulled() -> None:
    """x = (1 - sigma) x0 + sigma eps has v = eps - x0, so a model that says so has nothing to
    learn."""
    log_prob, old, weight = inputs()
    state = states()
    x0, eps, sigma = state["best_x0"], state["x"], state["sigma"][:, None, None]
    state |= {"x": (1 - sigma) * x0 + sigma * eps, "v": eps - x0}
    _, metrics = dynamic_clip(
        log_prob, old, weight, clip_min=0.1, clip_max=0.2, eta=1.0, sft=1.0, **state
    )
    assert float(metrics["sft"].max()) < 1e-24


def test_without_sft_the_states_are_not_looked_at() -> None:
    log_prob, old, weight = inputs()
    state: dict[str, Any] = {
        name: torch.full_like(value, torch.nan) for name, value in states().items()
    }
    loss, _ = dynamic_clip(log_prob, old, weight, clip_min=0.1, clip_max=0.2, eta=1.0, **state)
    assert bool(loss.isfinite().all())


def test_narrow_latents_are_compared_in_float32() -> None:
    """bfloat16 holds 8 bits: 256 + 1 is 256 there, so a distance of (257 - 256) would be 0."""
    one = torch.ones(1, 1)
    state: dict[str, Any] = {
        "v": 256 * one.bfloat16(),
        "x": 256 * one.bfloat16(),
        "best_x0": -one.bfloat16(),
        "sigma": one[0],
    }
    zero = torch.zeros(1)
    _, metrics = dynamic_clip(
        zero, zero, zero, clip_min=0.1, clip_max=0.2, eta=0.0, sft=2.0, best_advantage=zero, **state
    )
    assert metrics["sft"].tolist() == [1.0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip_min": 0.0},
        {"clip_max": 0.05},
        {"clip_max": 1.5},
        {"max_advantage": 0.0},
        {"sft": -1.0},
    ],
)
def test_wrong_options_are_named(wrong: dict[str, float]) -> None:
    log_prob, old, weight = inputs()
    ((name, value),) = wrong.items()
    options = {"clip_min": 0.1, "clip_max": 0.3, "eta": 1.0, **wrong}
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        dynamic_clip(log_prob, old, weight, **options, **states())  # type: ignore[arg-type]
