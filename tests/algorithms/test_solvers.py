"""The multistep solver against diffusers, exact solutions and its own limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flowrl.algorithms.rollout.solvers import dpmpp_2m
from flowrl.algorithms.transitions import euler
from flowrl.core.noise_path import flow_from_vp, interpolate, linear_grid, vp_from_flow, x0_from
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
