"""The evidence bound as a likelihood, and policy gradients on it: the numbers of EPG's code."""

from __future__ import annotations

import math
from typing import Any

import pytest
from losskit import loss_input, numbers
from torch import Tensor

from flowrl.algorithms.likelihoods.forward import Weight, _by_size, _weighted
from flowrl.algorithms.losses.policy import bound_gradient
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of

X0, EPS, SIGMA = numbers(0.5, -1), numbers(1, 0.25), 0.6
V, V_OLD = numbers(0.3, 1), numbers(0.2, 1.1)


def bound(v: Tensor, weight: Weight) -> Tensor:
    """The log-prob of likelihood `forward` at one place."""
    gap = (v - (EPS - X0))[None]
    sigma = numbers(SIGMA)
    if weight == "size":
        return -_by_size(gap, sigma)
    return -_weighted(gap.square().mean(1), sigma, weight)


@pytest.mark.parametrize(
    ("weight", "now", "old"),
    [
        # the reference's table of EPG's code
        ("size", -0.1366666667, -0.15),
        ("sigma2", -0.01845, -0.02025),
        ("one", -0.05125, -0.05625),
        ("snr", -0.0341098170, -0.0374376040),
    ],
)
def test_bounds_have_the_published_numbers(weight: Weight, now: float, old: float) -> None:
    assert float(bound(V, weight)) == pytest.approx(now, abs=1e-9)
    assert float(bound(V_OLD, weight)) == pytest.approx(old, abs=1e-9)


@pytest.mark.parametrize(
    ("form", "value", "gradient"),
    [
        # the published functions of c2570002 run on these numbers; the reference has these values,
        # and gradients that also go through the divisor, which theirs do not
        ("epg", 0.0069250546, (-0.0270246032, -0.0337807540)),
        ("pepg", 0.0050783733, (-0.0198180423, -0.0247725529)),
        ("par", 0.0006812452, (-0.0198180423, -0.0247725529)),
    ],
)
def test_bound_gradients_have_the_published_numbers(
    form: Any, value: float, gradient: tuple[float, float]
) -> None:
    """A = .05; pepg and par have one gradient, in which the divisor of `size` is a constant."""
    v = V.clone().requires_grad_()
    now, old = bound(v, "size"), bound(V_OLD, "size")
    loss, _ = bound_gradient(loss_input(now, old, numbers(0.5)), form=form, advantage_scale=0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, abs=1e-9)
    assert v.grad is not None and v.grad.tolist() == pytest.approx(gradient, abs=1e-9)
    # without the ratio: by hand
    plain, _ = bound_gradient(
        loss_input(now, old, numbers(0.5)), form="epg", ratio=False, advantage_scale=0.1
    )
    assert plain.item() == pytest.approx(-0.05 * now.item())
    with pytest.raises(ConfigError, match="advantage_scale > 0"):
        bound_gradient(loss_input(now, old, numbers(0.5)), advantage_scale=0.0)


def test_rows_without_an_advantage_are_pulled_back() -> None:
    """By hand: with A = 0 pepg is ``rho D l``, and par has its gradient ``rho D``; none for epg. So
    the loop must not leave such rows out."""
    old = numbers(0.2)
    cases: list[tuple[Any, float]] = [("epg", 0.0), ("pepg", 0.3), ("par", 0.3)]
    for form, expected in cases:
        now = numbers(0.5).requires_grad_()
        loss, _ = bound_gradient(loss_input(now, old, numbers(0.0)), form=form)
        loss.sum().backward()
        assert now.grad is not None
        assert now.grad.item() == pytest.approx(math.exp(0.3) * expected)
    assert "zero_advantage" in needs_of(bound_gradient)
