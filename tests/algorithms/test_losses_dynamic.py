"""Dynamic clip bounds and the pull towards the best leaf; what all losses promise is in
test_losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losskit import on_tensors, policies
from torch import Tensor

from flowrl.algorithms.losses import policy

dynamic_clip = on_tensors(policy.dynamic_clip)
ppo_clip = on_tensors(policy.ppo_clip)
COUNT = 40
WIDE: dict[str, Any] = {"clip_min": 0.1, "clip_max": 0.3, "eta": 1.0}


def states() -> dict[str, Any]:
    """Draw states, velocities and best leaves, in float64."""
    g = torch.Generator().manual_seed(1)
    v, x, best = torch.randn(3, COUNT, 3, 2, generator=g, dtype=torch.float64)
    sigma = torch.linspace(1, 0.05, COUNT, dtype=torch.float64)
    weight = torch.randn(COUNT, generator=g, dtype=torch.float64)
    pull = {"v": v.requires_grad_(), "x": x, "best_x0": best, "best_advantage": weight}
    return pull | {"sigma": sigma}


@pytest.mark.parametrize("segment", [None, torch.arange(COUNT) // 3], ids=["steps", "chunks"])
def test_without_eta_and_sft_it_is_ppo_with_the_middle_range(segment: Tensor | None) -> None:
    """Value, gradient and metrics to the bit; (1/8 + 1/4) / 2 = 3/16 is exact in binary."""
    log_prob, old, weight = policies(COUNT)
    both: dict[str, Any] = {"clip_low": 3 / 16, "clip_high": 3 / 16, "segment": segment}
    plain, wanted = ppo_clip(log_prob, old, weight, **both)
    bounds: dict[str, Any] = {"clip_min": 1 / 8, "clip_max": 1 / 4, "eta": 0.0, "segment": segment}
    got, metrics = dynamic_clip(log_prob, old, weight, **bounds, **states())
    assert torch.equal(got, plain) and 0 < float(metrics["clip_frac"].mean()) < 1
    gradients = [torch.autograd.grad(loss.sum(), log_prob)[0] for loss in (got, plain)]
    assert torch.equal(*gradients)
    wanted |= {"clip_range": torch.full((COUNT,), 3 / 16), "sft": torch.zeros(COUNT)}
    assert metrics.keys() == wanted.keys()
    for name, one in wanted.items():
        assert metrics[name].tolist() == one.tolist(), name


@pytest.mark.parametrize("eta", [0.5, -20.0])
def test_bounds_by_hand(eta: float) -> None:
    """e = .1 + .2 / (1 + exp(-eta A)), A cut at 5, so from .1 to .3; each row against ppo_clip with
    that very range."""
    log_prob, old, weight = policies(COUNT)
    weight = 4 * weight
    loss, metrics = dynamic_clip(log_prob, old, weight, **(WIDE | {"eta": eta}), **states())
    cut = [max(-5.0, min(5.0, a)) for a in weight.tolist()]
    wanted = [0.1 + 0.2 / (1 + math.exp(-eta * a)) for a in cut]
    assert 5 in cut and -5 in cut and metrics["clip_range"].tolist() == pytest.approx(wanted)
    for row, e in enumerate(wanted):
        one = [value[row : row + 1] for value in (log_prob, old, weight)]
        alone, found = ppo_clip(*one, clip_low=e, clip_high=e)
        assert float(loss[row].detach()) == pytest.approx(float(alone.detach()))
        assert float(metrics["clip_frac"][row]) == float(found["clip_frac"])


def test_pull_towards_the_best_leaf() -> None:
    """Value and gradient by the formula, on top of the clipped loss."""
    log_prob, old, weight = policies(COUNT)
    state = states()
    plain, _ = dynamic_clip(log_prob, old, weight, **WIDE, **state)
    loss, metrics = dynamic_clip(log_prob, old, weight, **WIDE, sft=0.4, **state)
    away = state["v"].detach() - (state["x"] - state["best_x0"]) / state["sigma"][:, None, None]
    scale = 0.4 / (1 + torch.exp(-state["best_advantage"]))
    wanted = scale * away.square().sum((1, 2)) / 6
    torch.testing.assert_close((loss - plain).detach(), wanted)
    torch.testing.assert_close(metrics["sft"], wanted)
    loss.sum().backward()
    torch.testing.assert_close(state["v"].grad, scale[:, None, None] * 2 * away / 6)


def test_the_velocity_of_the_straight_path_is_not_pulled() -> None:
    """x = (1 - sigma) x0 + sigma eps has v = eps - x0, so a model that says so has nothing to
    learn."""
    state = states()
    x0, eps, sigma = state["best_x0"], state["x"], state["sigma"][:, None, None]
    state |= {"x": (1 - sigma) * x0 + sigma * eps, "v": eps - x0}
    _, metrics = dynamic_clip(*policies(COUNT), **WIDE, sft=1.0, **state)
    assert float(metrics["sft"].max()) < 1e-24


def test_without_sft_the_states_are_not_looked_at() -> None:
    state = {name: torch.full_like(value, torch.nan) for name, value in states().items()}
    assert bool(dynamic_clip(*policies(COUNT), **WIDE, **state)[0].isfinite().all())


def test_narrow_latents_are_compared_in_float32() -> None:
    """bfloat16 holds 8 bits: 256 + 1 is 256 there, so a distance of (257 - 256) would be 0."""
    narrow, zero = torch.ones(1, 1).bfloat16(), torch.zeros(1)
    state: dict[str, Any] = {"v": 256 * narrow, "x": 256 * narrow, "best_x0": -narrow}
    state |= {"sigma": torch.ones(1), "best_advantage": zero}
    _, metrics = dynamic_clip(zero, zero, zero, **WIDE, sft=2.0, **state)
    assert metrics["sft"].tolist() == [1.0]
