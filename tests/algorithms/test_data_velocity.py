"""The penalty on real images: the numbers of DDRL's code, its two weights, and a loss that leaves
all to a penalty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from losskit import loss_input, numbers
from torch import Tensor

from flowrl.algorithms.losses.policy import penalty_alone
from flowrl.algorithms.penalties import data_velocity
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.types import LossInput, RealRows


def seen(v: Tensor, target: Tensor, sigma: Tensor) -> LossInput:
    """A batch whose own velocity says nothing, and real images."""
    rows = torch.zeros(len(v), dtype=torch.float64)
    data = loss_input(rows, rows, rows, v=torch.full_like(v, 7.0))
    return data._replace(data=RealRows(v, target, sigma))


@pytest.mark.parametrize(
    ("sigma", "edm", "one"),
    [
        (0.2, 0.7188203225, 1.0570887095),
        (0.5, 0.4349390961, 0.8698781922),
        (0.9, 0.5411489361, 0.6599377269),
    ],
)
def test_the_published_numbers(sigma: float, edm: float, one: float) -> None:
    """`compute_loss_with_epsilon_and_sigma` of cosmos-rl at 89f2e5b, run in float64 with its
    rectified-flow scaling on these eight numbers, a network `.3 x + .2 t - .1` and its noise level
    `s / (1 - s)`; `one` is its squared x0 error times the weight of that scaling, which DDRL does
    not use."""
    x0 = torch.linspace(-1, 1, 8, dtype=torch.float64)[None]
    eps = torch.arange(8, dtype=torch.float64).cos()[None]
    v = 0.3 * ((1 - sigma) * x0 + sigma * eps) + 0.2 * sigma - 0.1
    data = seen(v, eps - x0, numbers(sigma))
    assert float(data_velocity(data)) == pytest.approx(edm, abs=1e-9)
    assert float(data_velocity(data, weight="one")) == pytest.approx(one, abs=1e-9)


def test_by_hand() -> None:
    """Errors (1, 2) and (0, -2) have the mean squares 2.5 and 2; at .5 and .2 the weights are
    .25 + .25 and .04 + .64. The gradient of the first row is 2 (1, 2) / 2 times its weight."""
    target = torch.tensor([[1.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    v = torch.tensor([[2.0, 3.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    data = seen(v, target, numbers(0.5, 0.2))
    assert data_velocity(data, weight="one").tolist() == pytest.approx([2.5, 2.0])
    loss = data_velocity(data)
    assert loss.tolist() == pytest.approx([1.25, 1.36])
    loss[0].backward()
    assert v.grad is not None and v.grad.tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"data": None}, {}, "likelihood has no velocity"),
        ({}, {"weight": "two"}, 'weight "edm" or "one"'),
        ({}, {"fresh": "sigma"}, "fresh='sigma'"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], options: dict[str, Any], words: str) -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=words):
        data_velocity(seen(one, one, numbers(0.5))._replace(**change), **options)


def test_a_loss_that_leaves_all_to_the_penalty() -> None:
    """0 with a gradient of 0, so that a backward pass finds its way; rows of advantage 0 count."""
    log_prob = numbers(-1.0, -2.0).requires_grad_()
    loss, metrics = penalty_alone(loss_input(log_prob, log_prob.detach(), numbers(3.0, 0.0)))
    assert loss.tolist() == [0, 0] and metrics == {}
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert grad.tolist() == [0, 0]
    assert {"zero_advantage"} == needs_of(penalty_alone) and "data" in needs_of(data_velocity)
