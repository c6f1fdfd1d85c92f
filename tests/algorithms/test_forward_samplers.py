"""Samplers without draws, on data whose velocity is known: Gaussians of variance S^2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sigmakit import static_grid
from torch import Tensor

from flowrl.algorithms.plans.solvers import ode, sa_solver
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.algorithms.rollout.solvers import coefficients
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import per_sample
from flowrl.core.types import Cond, Plan


class Gaussian:
    """The exact velocity where data are N(0, variance)."""

    def __init__(self, variance: float) -> None:
        self.variance = variance

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """E[eps - x0 | x], linear in x."""
        s = sigma.double()
        total = (1 - s).square() * self.variance + s.square()
        return (x * per_sample((s - (1 - s) * self.variance) / total, x.double())).to(x)


def sampled(plan: Plan, variance: float, sigmas: Tensor, *, count: int = 1) -> Any:
    """Sample `count` latents of 4096 numbers -> the rollout."""
    model = Gaussian(variance)
    return rollout(
        model,  # type: ignore[arg-type]
        {"row": torch.zeros(1, 1)},
        plan,
        cps,
        sigmas=sigmas,
        shape=(4096,),
        group_size=count,
        generators=[torch.Generator().manual_seed(0)],
        store_dtype=torch.float64,
    )


def final_variance(plan: Plan, variance: float, sigmas: Tensor) -> float:
    """Sample without noise: the image is a multiple of the noise, squared its variance."""
    made = sampled(plan, variance, sigmas)
    ratio = made.x[made.leaf] / made.x[:1]
    assert float(ratio.std()) < 1e-6
    return float(ratio.mean().square())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # the published solver, Euler, and order 1 on the last interior step: an independent
        # recursion in float64 of the coefficients, by lambda = ln((1 - s) / s)
        ({"last_order": 2}, (1.862532, 0.493471, 0.040597)),
        ({"order": 1}, (0.668491, 0.128996, 0.009247)),
        ({}, (0.875012, 0.152383, 0.009660)),
    ],
)
def test_final_variance_of_nfts_solver(
    options: dict[str, int], expected: tuple[float, ...]
) -> None:
    """10 steps of SD3's grid, on data of variance 1, 0.25 and 0.04."""
    plan = ode(0, steps=10, **options)
    found = [final_variance(plan, s2, static_grid(10)) for s2 in (1.0, 0.25, 0.04)]
    assert found == pytest.approx(expected, rel=1e-4)  # the grid is float32


def test_wrong_orders_are_named() -> None:
    with pytest.raises(ConfigError, match="order=3"):
        ode(0, steps=4, order=3)


# -------------------------------------------------------------------------------------- SA-Solver


@pytest.mark.parametrize(
    ("tau", "nodes", "corrects", "expected"),
    [
        # published numbers of one step .7 -> .6 from x = .5, with the estimates .1 at .8, .2 at .7
        # and .25 at .6; run in AWM's code
        (0.0, (0.7,), False, 0.4571428571),
        (0.0, (0.7, 0.8), False, 0.4643865472),
        (0.0, (0.6, 0.7), True, 0.4615611847),
        (0.4, (0.7,), False, 0.4314019787),
        (0.4, (0.7, 0.8), False, 0.4398046593),
        (0.4, (0.6, 0.7), True, 0.4365272387),
    ],
)
def test_published_coefficients_of_sa_solver(
    tau: float, nodes: tuple[float, ...], corrects: bool, expected: float
) -> None:
    made = coefficients(0.7, 0.6, tau, nodes=nodes, corrects=corrects, published=True)
    estimates = {0.8: 0.1, 0.7: 0.2, 0.6: 0.25}
    older = estimates[nodes[-1]]
    x = made.x * 0.5 + made.newest * estimates[nodes[0]] + made.older * older
    assert x == pytest.approx(expected, abs=1e-10)
    assert made.noise == pytest.approx(0.2178638566 if tau else 0.0, abs=1e-10)


@pytest.mark.parametrize("tau", [0.0, 0.4])
def test_exact_coefficients_integrate_a_line(tau: float) -> None:
    """The update is ``kept x s'/s + a s' exp(-tau^2 l') int exp(a l) D(l) dl``; the integral of D =
    2 + 3 l by the trapezoidal rule on 20001 points, error below 1e-8."""
    a, (start, end) = 1 + tau**2, (math.log(0.3 / 0.7), math.log(0.4 / 0.6))
    line = torch.linspace(start, end, 20001, dtype=torch.float64)
    area = float(torch.trapezoid((a * line).exp() * (2 + 3 * line), line))
    wanted = a * 0.6 * math.exp(-(tau**2) * end) * area
    for nodes, corrects in (((0.7, 0.8), False), ((0.6, 0.7), True)):
        made = coefficients(0.7, 0.6, tau, nodes=nodes, corrects=corrects)
        newest, older = (2 + 3 * math.log((1 - s) / s) for s in nodes)
        assert made.newest * newest + made.older * older == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("published", [False, True])
def test_both_forms_are_of_second_order(published: bool) -> None:
    """Predictor alone, sigma 0.9 to 0.1 evenly in lambda, data of variance 0.25: doubling the steps
    quarters the error against the exact solution, a multiple that keeps x / std."""
    model, errors = Gaussian(0.25), []
    for steps in (40, 80):
        end = math.log(9)
        grid = torch.linspace(end, -end, steps + 1, dtype=torch.float64).sigmoid().tolist()
        x, past = torch.ones(1, 1, dtype=torch.float64), None
        for k in range(steps):
            x0 = x - grid[k] * model.velocity(x, torch.tensor([grid[k]]).double(), {})
            nodes = (grid[k], grid[k - 1]) if k else (grid[k],)
            made = coefficients(grid[k], grid[k + 1], 0.0, nodes=nodes, published=published)
            x = made.x * x + made.newest * x0 + (0 if past is None else made.older * past)
            past = x0
        stds = [math.sqrt((1 - s) ** 2 * 0.25 + s**2) for s in (0.9, 0.1)]
        errors.append(abs(float(x) - stds[1] / stds[0]))
    assert 3.4 < errors[0] / errors[1] < 4.6


GRID_14 = [0.999, 0.973058, 0.943048, 0.909412, 0.871453, 0.82828, 0.778738, 0.721306]
GRID_14 += [0.653936, 0.573805, 0.476909, 0.357368, 0.206198, 0.103099, 0]


def test_the_edited_grid() -> None:
    """14 steps of SD3's grid; published."""
    grid = sa_solver(0, steps=14).sigma_grid
    assert grid is not None
    assert read_sigma_grid(static_grid(14), grid).tolist() == pytest.approx(GRID_14, abs=1e-6)


@pytest.mark.parametrize(
    ("form", "noise_scale", "expected"),
    [
        # variance of the image over that of the initial noise (0.4: with unit noise), for data of
        # variance 1 and 0.25, by an independent recursion of the coefficients on each noise vector;
        # published without noise also by a run of AWM's code: 1.2018 and .29257
        ("published", 0.0, (1.20176, 0.29257)),
        ("published", 0.4, (1.25143, 0.30193)),
        ("exact", 0.0, (1.09309, 0.26165)),
    ],
)
def test_final_variance_of_sa_solver(
    form: Any, noise_scale: float, expected: tuple[float, float]
) -> None:
    """Without noise to the grid's float32; with noise 32 x 4096 numbers, 5 standard errors."""
    plan = sa_solver(0, steps=14, noise_scale=noise_scale, form=form)
    assert plan.sigma_grid is not None
    sigmas = read_sigma_grid(static_grid(14), plan.sigma_grid)
    for variance, wanted in zip((1.0, 0.25), expected, strict=True):
        if not noise_scale:
            found = final_variance(plan, variance, sigmas)
            assert found == pytest.approx(wanted, rel=1e-4)
            continue
        made = sampled(plan, variance, sigmas, count=32)
        images = made.x[made.leaf]
        assert float(images.var()) == pytest.approx(wanted, rel=5 * (2 / images.numel()) ** 0.5)
        again = sampled(plan, variance, sigmas, count=32)
        assert torch.equal(again.x, made.x)


def test_what_sa_solver_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="steps >= 3"):
        sa_solver(0, steps=2)
    with pytest.raises(ConfigError, match="low <= high"):
        sa_solver(0, steps=4, low=0.9, high=0.3)
    noisy = sa_solver(0, steps=4)._replace(noise=torch.full((4,), 0.1))
    with pytest.raises(ConfigError, match="noise of its own"):
        sampled(noisy, 1.0, static_grid(4))
