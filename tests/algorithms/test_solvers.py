"""The multistep solver against diffusers, exact solutions and its own limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flowrl.algorithms.rollout.solvers import dpmpp_2m
from flowrl.algorithms.transitions import euler
from flowrl.core.noise_path import (
    flow_from_vp,
    interpolate,
    linear_grid,
    shift_sigmas,
    vp_from_flow,
    x0_from,
)
from flowrl.models.toy import GaussianFlow


def walk(grid: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the noise levels [4] of each step."""
    yield from ((a.expand(4), b.expand(4)) for a, b in zip(grid[:-1], grid[1:], strict=True))


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # of diffusers, under numpy 2
@pytest.mark.parametrize("first", [1.0, 0.96])
@pytest.mark.parametrize("steps", [3, 8, 25])
def test_the_same_velocities_give_the_states_of_diffusers(first: float, steps: int) -> None:
    """The scheduler of diffusers 0.42 on our grid; velocities that depend on the state, here and
    there from its own."""
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2,
        algorithm_type="dpmsolver++",
        solver_type="midpoint", final_sigmas_type="zero",
    )  # fmt: skip
    grid = first * linear_grid(steps, 3.0)
    scheduler.set_timesteps(steps)
    scheduler.sigmas = grid
    scheduler.set_begin_index(0)
    generator = torch.Generator().manual_seed(steps)
    theirs = x = torch.randn(4, 3, generator=generator)
    mix, past, past_sigma = torch.randn(3, 3, generator=generator), None, None
    for k, (sigma, sigma_next) in enumerate(walk(grid)):
        v = torch.tanh(theirs @ mix) + sigma[0].sin()
        theirs = scheduler.step(v, scheduler.timesteps[k], theirs).prev_sample
        x_next = dpmpp_2m(x, v, sigma, sigma_next, past, past_sigma)
        past, past_sigma, x = x0_from(x, v, sigma), sigma, x_next
        torch.testing.assert_close(x, theirs, atol=1e-5, rtol=1e-5)


def errors(low: float, high: float, steps: int) -> tuple[float, float]:
    """Solve the ODE of Gaussian data, whose velocity and solution are known -> largest error of 2M
    and of Euler."""
    model, z = (
        GaussianFlow(mean=0.5, variance=0.3),
        torch.linspace(-2, 2, 4, dtype=torch.float64)[:, None],
    )

    def exact(s: float) -> Tensor:
        return (1 - s) * 0.5 + math.hypot((1 - s) * math.sqrt(0.3), s) * z

    x, plain, past, past_sigma = exact(high), exact(high), None, None
    for sigma, sigma_next in walk(torch.linspace(high, low, steps + 1, dtype=torch.float64)):
        v = model.velocity(x, sigma, {})
        x, past, past_sigma = (
            dpmpp_2m(x, v, sigma, sigma_next, past, past_sigma),
            x0_from(x, v, sigma),
            sigma,
        )
        plain = euler(plain, model.velocity(plain, sigma, {}), sigma, sigma_next)
    return float((x - exact(low)).abs().max()), float((plain - exact(low)).abs().max())


@pytest.mark.parametrize("high", [0.9, 1.0])
def test_it_is_of_second_order(high: float) -> None:
    """Half the step, a quarter of the error; Euler's is halved."""
    runs = [errors(0.1, high, steps) for steps in (32, 64, 128, 256)]
    for (big, euler_big), (small, euler_small) in zip(runs, runs[1:], strict=False):
        assert 3.8 < big / small < 4.3 and 1.9 < euler_big / euler_small < 2.1


def test_it_beats_euler_from_noise_to_data() -> None:
    """The whole path, its first-order ends included: a factor of 5 at 8 steps, measured here, grows
    with the steps."""
    gains = [
        euler_error / error for error, euler_error in (errors(0.0, 1.0, n) for n in (8, 64, 256))
    ]
    assert gains[0] > 5 and gains[1] > 10 and gains[2] > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_estimate_is_solved_exactly(dtype: torch.dtype) -> None:
    """With one data point the flow is a straight line to it: every step of any size lands on the
    path."""
    generator = torch.Generator().manual_seed(0)
    x0, eps = torch.randn(2, 4, 3, generator=generator, dtype=dtype)
    grid = torch.tensor([1.0, 0.999, 0.5, 0.499, 0.01, 0.0], dtype=dtype)
    x, past, past_sigma = eps, None, None
    for sigma, sigma_next in walk(grid):
        x, past, past_sigma = dpmpp_2m(x, eps - x0, sigma, sigma_next, past, past_sigma), x0, sigma
        # roundings of x0 are multiplied by h / (2 h_past), which is 575 at the step from 0.499 to
        # 0.01
        torch.testing.assert_close(
            x, interpolate(x0, eps, sigma_next), atol=2000 * torch.finfo(dtype).eps, rtol=0
        )


def test_the_first_order_of_the_papers_is_eulers_step() -> None:
    """``(s'/s) x - (1 - s') (e^-h - 1) D`` in float64, and to the bit where no second order can be
    taken."""
    generator = torch.Generator().manual_seed(1)
    x, v, past = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
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


def test_the_second_order_term_as_written_in_the_papers() -> None:
    """Rows of one batch at different levels; ``D + (D - D_past) / (2 r)``, ``r = h_past / h``, in
    float64."""
    generator = torch.Generator().manual_seed(2)
    x, v, past = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
    p, s, t = torch.tensor(
        [[0.99, 0.9, 0.31, 0.3], [0.95, 0.5, 0.3, 0.02], [0.9, 0.1, 0.05, 0.01]]
    ).double()

    def snr(sigma: Tensor) -> Tensor:
        return torch.log((1 - sigma) / sigma)

    h, r = snr(t) - snr(s), (snr(s) - snr(p)) / (snr(t) - snr(s))
    now = x - s[:, None] * v
    estimate = now + (now - past) / (2 * r[:, None])
    want = (t / s)[:, None] * x - ((1 - t) * torch.expm1(-h))[:, None] * estimate
    torch.testing.assert_close(dpmpp_2m(x, v, s, t, past, p), want, atol=1e-11, rtol=1e-11)


def test_the_step_does_not_depend_on_the_path() -> None:
    """In variance-preserving coordinates, ``x = a x0 + s eps``, the published update gives the same
    latent."""
    generator = torch.Generator().manual_seed(3)
    x0, eps, past = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
    angles = torch.tensor([1.3, 1.1, 0.6], dtype=torch.float64)[:, None].expand(3, 4)
    (a_past, a, a_next), (s_past, s, s_next) = angles.cos(), angles.sin()
    h, h_past = (
        torch.log(b / t) - torch.log(c / u)
        for b, t, c, u in ((a_next, s_next, a, s), (a, s, a_past, s_past))
    )
    vp = a[:, None] * x0 + s[:, None] * eps
    estimate = x0 + (x0 - past) * (h / (2 * h_past))[:, None]
    want = (s_next / s)[:, None] * vp - (a_next * torch.expm1(-h))[:, None] * estimate
    (x, sigma), sigma_next, past_sigma = (
        flow_from_vp(vp, a, s),
        s_next / (a_next + s_next),
        s_past / (a_past + s_past),
    )
    got = dpmpp_2m(x, eps - x0, sigma, sigma_next, past, past_sigma)
    torch.testing.assert_close(vp_from_flow(got, sigma_next), want, atol=1e-13, rtol=0)


def test_grid_c_stays_finite() -> None:
    """From sigma 1 to 0 in float32, the pasts of both ends included."""
    x, past, past_sigma = torch.ones(4, 3), None, None
    for sigma, sigma_next in walk(shift_sigmas(torch.linspace(1, 0, 26), 3.0)):
        v = -0.3 * x
        x, past, past_sigma = (
            dpmpp_2m(x, v, sigma, sigma_next, past, past_sigma),
            x0_from(x, v, sigma),
            sigma,
        )
        assert bool(x.isfinite().all())
