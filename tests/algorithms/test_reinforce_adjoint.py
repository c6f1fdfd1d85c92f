"""Reinforce Adjoint Matching: the reference's numbers, its closed optimum, the gradient it shares
with AWM, and its noise levels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from losskit import loss_input, numbers
from torch import Tensor

from flowrl.algorithms.likelihoods.forward import forward
from flowrl.algorithms.losses.matching import ram
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput

X0, EPS = numbers(0.5, -1), numbers(1, 0.25)
TARGET = (EPS - X0)[None]
V, V_OLD, V_REF = numbers(0.3, 1)[None], numbers(0.2, 1.1)[None], numbers(0.25, 1.05)[None]
ONE = torch.ones(1, dtype=torch.float64)


def seen(advantage: float, v: Tensor = V, old: Tensor = V_OLD) -> LossInput:
    """Put one image of two numbers where the loss looks for it."""
    under = {"old": Eval(ONE, old, ONE), "ref": Eval(ONE, V_REF, ONE)}
    data = loss_input(ONE, ONE, advantage * ONE, mean=v)
    return data._replace(batch=data.batch._replace(target=TARGET), under=under)


def gradient(loss: Tensor, v: Tensor) -> Tensor:
    """Differentiate a loss by the velocity."""
    (found,) = torch.autograd.grad(loss.sum(), v)
    return found


def test_it_has_the_published_number() -> None:
    """The published loss was run on these numbers, with a scaled advantage of .5: target (.4,
    1.125), loss .0128125. Metrics by hand."""
    loss, metrics = ram(seen(0.25), advantage_scale=2.0)
    assert loss.item() == pytest.approx(0.0128125, abs=1e-12)
    wanted = {"error": 0.05125, "from_base": 0.0025, "drift": 0.01}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("advantage", [2.0, -0.5, 0.0])
def test_the_optimum_is_closed_and_without_advantage_the_base_model(advantage: float) -> None:
    """The gradient vanishes at v_ref + scale A (u - v_old), and nowhere near it."""
    best = V_REF + 3.0 * advantage * (TARGET - V_OLD)
    for v, flat in ((best, True), (best + 0.1, False)):
        v = v.clone().requires_grad_()
        found = gradient(ram(seen(advantage, v), advantage_scale=3.0)[0], v)
        assert bool((found.abs() < 1e-12).all()) == flat


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_on_policy_it_moves_as_awm_with_a_penalty_towards_the_base_model(advantage: float) -> None:
    """By autograd, of mean (v - v_ref)^2 + scale A mean (v - u)^2."""
    v = V_OLD.clone().requires_grad_()
    found = gradient(ram(seen(advantage, v), advantage_scale=3.0)[0], v)
    plain = (v - V_REF).square().mean() + 3.0 * advantage * (v - TARGET).square().mean()
    torch.testing.assert_close(found, gradient(plain, v))


def test_neither_base_nor_old_velocity_has_a_gradient() -> None:
    v, old = V.clone().requires_grad_(), V_OLD.clone().requires_grad_()
    loss, _ = ram(seen(1.0, v, old))
    loss.sum().backward()
    assert v.grad is not None and old.grad is None


@pytest.mark.parametrize("exponent", [0.0, 1.0, 3.0])
def test_levels_have_a_density_that_is_a_power(exponent: float) -> None:
    """The share below t on [.2, .9] is (t^p - .2^p) / (.9^p - .2^p) with p = exponent + 1: one in
    each of four parts of it, and evenly inside these, within 4 standard errors."""
    options: dict[str, Any] = {"times": "power_law", "exponent": exponent, "low": 0.2, "high": 0.9}
    sampler = forward(draws=4, **options).times
    streams = (torch.Generator().manual_seed(seed) for seed in range(300))
    found = torch.stack([sampler.draw(stream, torch.empty(0)) for stream in streams]).double()
    power = exponent + 1
    share = (found**power - 0.2**power) / (0.9**power - 0.2**power)
    places = (share.flip(1) * 4 - torch.arange(4)).flatten()
    assert -1e-5 < places.min() < 0.01 and 0.99 < places.max() < 1 + 1e-5
    assert abs(places.mean() - 0.5) < 4 * (1 / 12 / 1200) ** 0.5


WRONG: list[tuple[Any, str]] = [
    (lambda: ram(seen(1.0), advantage_scale=0.0), "advantage_scale > 0"),
    (lambda: forward(times="power_law", exponent=-0.5), "at least 0"),
    (lambda: forward(times="uniform", exponent=2.0), "belongs to times: power_law"),
    (lambda: forward(times="power_law", last=3), "belong to times: grid"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
