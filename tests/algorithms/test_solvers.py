"""Samplers without trained draws: DPM-Solver++ 2M, SA-Solver, and what they make of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from sigmakit import static_grid
from torch import Tensor

from flowrl.algorithms.plans.solvers import ode, sa_solver
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.algorithms.rollout.solvers import coefficients, dpmpp_2m
from flowrl.algorithms.transitions import cps, euler
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import (
    flow_from_vp,
    interpolate,
    linear_grid,
    per_sample,
    vp_from_flow,
    x0_from,
)
from flowrl.core.types import Cond, Plan
from flowrl.models.toy import GaussianFlow


def drawn(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def solve(x: Tensor, grid: Tensor, velocity: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Walk down a grid of sigmas for 4 rows, with v(x, sigma) -> the latent after each step."""
    past: Tensor | None = None
    past_sigma: Tensor | None = None
    out = []
    for one, after in zip(grid[:-1], grid[1:], strict=True):
        sigma = one.expand(4)
        v = velocity(x, sigma)
        estimate = x0_from(x, v, sigma)
        x = dpmpp_2m(x, v, sigma, after.expand(4), past, past_sigma)
        past, past_sigma = estimate, sigma
        out.append(x)
    return out


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # of diffusers, under numpy 2
@pytest.mark.parametrize("first", [1.0, 0.96])
@pytest.mark.parametrize("steps", [3, 8, 25])
def test_the_same_velocities_give_the_states_of_diffusers(first: float, steps: int) -> None:
    """The scheduler of diffusers 0.42 on our grid; velocities that depend on its own state."""
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2,
        algorithm_type="dpmsolver++", solver_type="midpoint", final_sigmas_type="zero",
    )  # fmt: skip
    grid = first * linear_grid(steps, 3.0)
    scheduler.set_timesteps(steps)
    scheduler.sigmas = grid
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(steps)
    start, mix = (torch.randn(size, 3, generator=generator) for size in (4, 3))
    theirs = [start]

    def velocity(_: Tensor, sigma: Tensor) -> Tensor:
        v = torch.tanh(theirs[-1] @ mix) + sigma[0].sin()
        now = scheduler.timesteps[len(theirs) - 1]
        theirs.append(scheduler.step(v, now, theirs[-1]).prev_sample)
        return v

    for ours, wanted in zip(solve(start, grid, velocity), theirs[1:], strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


def errors(low: float, high: float, steps: int) -> tuple[float, float]:
    """Solve the ODE of Gaussian data, whose velocity and solution are known -> largest error of 2M
    and of Euler."""
    model = GaussianFlow(mean=0.5, variance=0.3)
    z = torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None]

    def exact(s: float) -> Tensor:
        return (1 - s) * 0.5 + math.hypot((1 - s) * math.sqrt(0.3), s) * z

    grid = torch.linspace(high, low, steps + 1, dtype=torch.float64)
    last = solve(exact(high), grid, lambda x, sigma: model.velocity(x, sigma, {}))[-1]
    plain = exact(high)
    for one, after in zip(grid[:-1].expand(4, -1).T, grid[1:].expand(4, -1).T, strict=True):
        plain = euler(plain, model.velocity(plain, one, {}), one, after)
    return float((last - exact(low)).abs().max()), float((plain - exact(low)).abs().max())


@pytest.mark.parametrize("high", [0.9, 1.0])
def test_it_is_of_second_order(high: float) -> None:
    """Half the step, a quarter of the error; Euler's is halved."""
    runs = [errors(0.1, high, steps) for steps in (32, 64, 128, 256)]
    for (big, euler_big), (small, euler_small) in zip(runs, runs[1:], strict=False):
        assert 3.8 < big / small < 4.3 and 1.9 < euler_big / euler_small < 2.1


@pytest.mark.parametrize(("steps", "factor"), [(8, 5), (64, 10), (256, 30)])
def test_it_beats_euler_from_noise_to_data(steps: int, factor: float) -> None:
    """The whole path, its first-order ends included; the factors were measured here."""
    error, euler_error = errors(0.0, 1.0, steps)
    assert euler_error > factor * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_estimate_is_solved_exactly(dtype: torch.dtype) -> None:
    """With one data point the flow is a straight line to it: every step of any size lands on the
    path, from sigma 1 to 0. Roundings of x0 are multiplied by h / (2 h_past), which is 575 at the
    step from 0.499 to 0.01."""
    x0, eps = drawn(2, 0, dtype)
    grid = torch.tensor([1.0, 0.999, 0.5, 0.499, 0.01, 0.0], dtype=dtype)
    near = 2000 * torch.finfo(dtype).eps
    for x, sigma in zip(solve(eps, grid, lambda *_: eps - x0), grid[1:], strict=True):
        wanted = interpolate(x0, eps, sigma.expand(4))
        torch.testing.assert_close(x, wanted, atol=near, rtol=0)


def test_the_first_order_of_the_papers_is_eulers_step() -> None:
    """``(s'/s) x - (1 - s') (e^-h - 1) D`` in float64, and to the bit where no second order can be
    taken; half precision is computed in float32."""
    x, v, past = drawn(3, 1)
    s, t = torch.tensor([[0.95, 0.6, 0.3, 0.02], [0.9, 0.1, 0.299, 0.001]], dtype=torch.float64)
    h = torch.log((1 - t) / t) - torch.log((1 - s) / s)
    paper = (t / s)[:, None] * x - ((1 - t) * torch.expm1(-h))[:, None] * (x - s[:, None] * v)
    torch.testing.assert_close(dpmpp_2m(x, v, s, t), paper, atol=1e-14, rtol=1e-12)
    ends = torch.tensor([1.0, 0.5, 0.5, 1.0]), torch.tensor([0.5, 0.0, 0.4, 0.0])
    before = torch.tensor([1.0, 0.7, 1.0, 1.0])
    got = dpmpp_2m(x.float(), v.float(), *ends, past.float(), before)
    assert torch.equal(got, euler(x.float(), v.float(), *ends)) and got.dtype == torch.float32
    half = dpmpp_2m(x.half(), v.half(), *ends)
    assert half.dtype == torch.float32 and torch.equal(half, euler(x.half(), v.half(), *ends))


def test_the_second_order_reference_fixture() -> None:
    """sigma .8, .6, .4, x = .5, D = .2 so that v = (x - D) / .6 = .5, D_past = .1: the reference's
    float64 values, .4 without the past."""
    x, v, past = (torch.tensor([[n]], dtype=torch.float64) for n in (0.5, 0.5, 0.1))
    before, here, after = (torch.tensor([n], dtype=torch.float64) for n in (0.8, 0.6, 0.4))
    assert float(dpmpp_2m(x, v, here, after)) == pytest.approx(0.4, abs=1e-12)
    got = float(dpmpp_2m(x, v, here, after, past, before))
    assert got == pytest.approx(0.4137796702, abs=1e-10)


def test_the_second_order_term_as_written_in_the_papers() -> None:
    """Rows of one batch at different levels; ``D + (D - D_past) / (2 r)``, ``r = h_past / h``, in
    float64."""
    x, v, past = drawn(3, 2)
    levels = [[0.99, 0.9, 0.31, 0.3], [0.95, 0.5, 0.3, 0.02], [0.9, 0.1, 0.05, 0.01]]
    p, s, t = torch.tensor(levels, dtype=torch.float64)
    snr_p, snr_s, snr_t = (torch.log((1 - sigma) / sigma) for sigma in (p, s, t))
    h, r = snr_t - snr_s, (snr_s - snr_p) / (snr_t - snr_s)
    now = x - s[:, None] * v
    estimate = now + (now - past) / (2 * r[:, None])
    want = (t / s)[:, None] * x - ((1 - t) * torch.expm1(-h))[:, None] * estimate
    torch.testing.assert_close(dpmpp_2m(x, v, s, t, past, p), want, atol=1e-11, rtol=1e-11)


def test_the_step_does_not_depend_on_the_path() -> None:
    """In variance-preserving coordinates, ``x = a x0 + s eps``, the published update gives the same
    latent."""
    x0, eps, past = drawn(3, 3)
    angles = torch.tensor([1.3, 1.1, 0.6], dtype=torch.float64)[:, None].expand(3, 4)
    (a_past, a, a_next), (s_past, s, s_next) = angles.cos(), angles.sin()
    snr_past, snr, snr_next = angles.cos().log() - angles.sin().log()
    h, h_past = snr_next - snr, snr - snr_past
    vp = a[:, None] * x0 + s[:, None] * eps
    estimate = x0 + (x0 - past) * (h / (2 * h_past))[:, None]
    want = (s_next / s)[:, None] * vp - (a_next * torch.expm1(-h))[:, None] * estimate
    x, sigma = flow_from_vp(vp, a, s)
    sigma_next, past_sigma = s_next / (a_next + s_next), s_past / (a_past + s_past)
    got = dpmpp_2m(x, eps - x0, sigma, sigma_next, past, past_sigma)
    torch.testing.assert_close(vp_from_flow(got, sigma_next), want, atol=1e-13, rtol=0)


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
