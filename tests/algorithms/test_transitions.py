"""The kernels against closed forms: moments, special cases, densities."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.algorithms.transitions import (
    coefficient_preserving,
    cps,
    dance_sde,
    ddim,
    draw,
    euler,
    euler_maruyama,
    flow_sde,
    gaussian_kl,
    gaussian_log_prob,
)
from flowrl.core.noise_path import flow_from_vp, shift_sigmas, static_grid, velocity_from_eps
from flowrl.core.types import Gaussian, Transition
from flowrl.models.toy import GaussianFlow

ALL = [flow_sde, dance_sde, cps, ddim]


def grid_c(steps: int) -> Tensor:
    return shift_sigmas(torch.linspace(1, 0, steps + 1, dtype=torch.float64), 3.0)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def moments(
    transition: Transition, noise_scale: Tensor, sigmas: Tensor, variance: float
) -> tuple[list[float], list[float]]:
    """Push N(0, 1) noise through the steps exactly -> mean and variance after each step, data
    N(0.5, variance).

    With the exact velocity of Gaussian data every step is affine in x, so its two coefficients are
    read off at x = 0 and x = 1, all steps in one batch.
    """
    model = GaussianFlow(mean=0.5, variance=variance)
    sigma, sigma_next = sigmas[:-1], sigmas[1:]

    def at(value: float) -> Gaussian:
        x = torch.full((len(sigma), 1), value, dtype=torch.float64)
        return transition(x, model.velocity(x, sigma, {}), sigma, sigma_next, noise_scale)

    offset = at(0.0).mean[:, 0]
    slope = (at(1.0).mean[:, 0] - offset).tolist()
    m, s2, means, variances = 0.0, 1.0, [], []
    for a, b, std in zip(slope, offset.tolist(), at(0.0).std.tolist(), strict=True):
        m, s2 = a * m + b, a * a * s2 + std * std
        means.append(m)
        variances.append(s2)
    return means, variances


def final_variance(
    transition: Transition, noise_scale: float, steps: int, variance: float
) -> float:
    return moments(transition, torch.full((steps,), noise_scale).double(), grid_c(steps), variance)[
        1
    ][-1]


def test_reference_fixture() -> None:
    """x=.8, v=-.5, sigma .7 -> .5, noise_scale .7: numpy float64 values of the reference."""
    x, v, s, s_next, noise_scale = one(0.8)[None], one(-0.5)[None], one(0.7), one(0.5), one(0.7)
    flow = flow_sde(x, v, s, s_next, noise_scale)
    assert float(flow.mean) == pytest.approx(0.7938333, abs=1e-7)
    assert float(flow.std) == pytest.approx(0.4781910, abs=1e-7)
    assert float(gaussian_log_prob(one(0.9)[None], *flow)) == pytest.approx(-0.2058394, abs=1e-7)
    dance = dance_sde(x, v, s, s_next, noise_scale)
    assert (float(dance.mean), float(dance.std)) == pytest.approx((0.8545, 0.3130495), abs=1e-7)
    kept = cps(x, v, s, s_next, noise_scale)
    assert (float(kept.mean), float(kept.std)) == pytest.approx((0.7225469, 0.4455033), abs=1e-7)


@pytest.mark.parametrize("transition", ALL)
def test_level_zero_is_the_euler_step_to_the_bit(transition: Transition) -> None:
    torch.manual_seed(0)
    sigmas = static_grid(10)
    x, v = torch.randn(10, 3, 4), torch.randn(10, 3, 4)
    step = transition(x, v, sigmas[:-1], sigmas[1:], torch.zeros(10))
    assert torch.equal(step.mean, euler(x, v, sigmas[:-1], sigmas[1:]))
    assert torch.equal(step.mean, x - (sigmas[:-1] - sigmas[1:])[:, None, None] * v)
    assert torch.equal(step.std, torch.zeros(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("transition", "slope"), [(flow_sde, True), (dance_sde, False)])
def test_three_algebraic_forms_agree(
    transition: Transition, slope: bool, dtype: torch.dtype
) -> None:
    """The score form and the (x0, eps) form, written out independently from the table of SDE
    variants."""
    torch.manual_seed(0)
    s, s_next = (
        torch.tensor([0.9, 0.5, 0.2], dtype=dtype),
        torch.tensor([0.7, 0.3, 0.0], dtype=dtype),
    )
    x, v, a = (
        torch.randn(3, 5, dtype=dtype),
        torch.randn(3, 5, dtype=dtype),
        torch.full((3,), 0.7, dtype=dtype),
    )
    got = transition(x, v, s, s_next, a)
    d = s - s_next
    g = a * (s / (1 - s)).sqrt() if slope else a
    std = g * d.sqrt()
    col = [t[:, None] for t in (s, s_next, d, g, std)]
    s_, n_, d_, g_, std_ = col
    x0, eps = x - s_ * v, x + (1 - s_) * v
    score = -(x - (1 - s_) * x0) / s_.square()
    by_score = x - d_ * v + 0.5 * g_.square() * score * d_
    by_ends = (1 - n_) * x0 + (n_ - std_.square() / (2 * s_)) * eps
    by_xv = x * (1 - g_.square() * d_ / (2 * s_)) - v * (1 + g_.square() * (1 - s_) / (2 * s_)) * d_
    for form in (by_score, by_ends, by_xv):
        torch.testing.assert_close(got.mean, form, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.std, std)
    if slope:  # with g^2 = a^2 s / (1 - s) the mean collapses
        short = (
            x * (1 - a[:, None].square() * d_ / (2 * (1 - s_)))
            - v * (1 + a[:, None].square() / 2) * d_
        )
        torch.testing.assert_close(got.mean, short, atol=1e-5, rtol=0)


def test_cps_keeps_the_coefficients_and_equals_its_direct_form() -> None:
    """c^2 + std^2 = sigma_next^2 and mean = (1 - sigma_next) x0 + c eps: the definition of the
    method."""
    torch.manual_seed(0)
    s, s_next, h = (
        one(0.9).expand(4),
        torch.tensor([0.8, 0.5, 0.1, 0.0]).double(),
        one(0.8).expand(4),
    )
    eps = torch.ones(4, 1).double()
    c = cps(s[:, None] * eps, eps, s, s_next, h).mean[
        :, 0
    ]  # x0 = 0, eps = 1, so v = 1 and the mean is c
    std = cps(s[:, None] * eps, eps, s, s_next, h).std
    torch.testing.assert_close(c.square() + std.square(), s_next.square(), atol=1e-7, rtol=0)
    x, v = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    direct = (1 - s_next)[:, None] * (x - s[:, None] * v) + (s_next * torch.cos(h * math.pi / 2))[
        :, None
    ] * (x + (1 - s)[:, None] * v)
    torch.testing.assert_close(cps(x, v, s, s_next, h).mean, direct)
    assert float(std[-1]) == 0


def test_flow_sde_per_step_constants_on_the_sd3_grid() -> None:
    """g, std, c of every step, N=10, noise_scale .7: the reference table, derived in numpy
    float64."""
    sigmas = static_grid(10).double()
    s, s_next = sigmas[:-1], sigmas[1:]
    noise_scale, ones = torch.full((10,), 0.7).double(), torch.ones(10, 1).double()
    step = flow_sde(
        s[:, None] * ones, ones, s, s_next, noise_scale
    )  # x0 = 0, eps = 1: the mean is c
    std = [0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254, 0.0063]
    g = [3.5057, 3.4351, 2.2726, 1.7185, 1.3592, 1.0881, 0.8612, 0.6524, 0.4344, 0.0664]
    c = [0.7151, 0.6259, 0.7003, 0.6745, 0.6102, 0.5142, 0.3803, 0.1925, -0.0824, -0.0022]
    total = [1.0007, 0.9715, 0.8820, 0.8085, 0.7251, 0.6236, 0.4965, 0.3415, 0.2400, 0.0067]
    assert step.std.tolist() == pytest.approx(std, abs=6e-5)
    assert (step.std / (s - s_next).sqrt()).tolist() == pytest.approx(g, abs=6e-5)
    assert step.mean[:, 0].tolist() == pytest.approx(c, abs=6e-5)
    assert torch.hypot(step.mean[:, 0], step.std).tolist() == pytest.approx(total, abs=6e-5)
    # 1 / mean(std) over the nine trained steps: TempFlow-GRPO's published weight 2.25
    assert 1 / float(step.std[:9].mean()) == pytest.approx(2.252, abs=5e-4)


@pytest.mark.parametrize("noise_scale", [0.3, 0.7, 1.5])
def test_flow_sde_has_std_equal_to_level_at_sigma_one(noise_scale: float) -> None:
    """std_0 = a sqrt(D / (1 - sigma_1)) and D = 1 - sigma_1."""
    sigmas = static_grid(10)
    x = torch.randn(10, 2)
    step = flow_sde(x, x, sigmas[:-1], sigmas[1:], torch.full((10,), noise_scale))
    assert float(step.std[0]) == pytest.approx(noise_scale, rel=1e-6)
    assert bool(step.mean.isfinite().all()) and bool(step.std.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transition", ALL)
def test_half_precision_is_computed_in_float32(transition: Transition, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 4).to(dtype), torch.randn(2, 4).to(dtype)
    s, s_next, noise_scale = (
        torch.tensor([0.9, 0.6]),
        torch.tensor([0.8, 0.4]),
        torch.full((2,), 0.5),
    )
    got, wanted = (
        transition(x, v, s, s_next, noise_scale),
        transition(x.float(), v.float(), s, s_next, noise_scale),
    )
    assert got.mean.dtype == torch.float32 and torch.equal(got.mean, wanted.mean)
    assert gaussian_log_prob(x, *got).dtype == torch.float32


# variance of the data, steps, then Euler, flow .7, dance .3, cps .8: numpy float64, last step with
# noise
TABLE = [
    (1.00, 10, 0.694, 0.801, 0.704, 0.467),
    (1.00, 16, 0.797, 0.874, 0.804, 0.519),
    (1.00, 25, 0.865, 0.921, 0.870, 0.555),
    (1.00, 200, 0.982, 0.996, 0.983, 0.631),
    (1.00, 2000, 0.998, 1.002, 0.998, 0.650),
    (0.25, 16, 0.173, 0.202, 0.181, 0.116),
    (0.25, 2000, 0.249, 0.250, 0.249, 0.162),
    (0.04, 10, 0.0096, 0.0423, 0.0266, 0.0086),
    (0.04, 2000, 0.0397, 0.0399, 0.0398, 0.0256),
]


@pytest.mark.parametrize(("variance", "steps", "ode", "flow", "dance", "kept"), TABLE)
def test_final_variance_of_gaussian_data(
    variance: float, steps: int, ode: float, flow: float, dance: float, kept: float
) -> None:
    cases = [(dance_sde, 0.0), (flow_sde, 0.7), (dance_sde, 0.3), (cps, 0.8)]
    got = [final_variance(t, noise_scale, steps, variance) for t, noise_scale in cases]
    assert got == pytest.approx([ode, flow, dance, kept], abs=6e-4 if variance > 0.1 else 6e-5)
    assert moments(cps, torch.full((steps,), 0.8).double(), grid_c(steps), variance)[0][
        -1
    ] == pytest.approx(0.5)


@pytest.mark.parametrize(("start", "expected"), [(0, 0.953), (5, 0.881), (12, 0.878), (19, 0.872)])
def test_final_variance_with_a_window(start: int, expected: float) -> None:
    """MixGRPO, N=25, noise_scale .7, four noisy steps, data variance 1: reference values."""
    noise_scale = torch.zeros(25).double()
    noise_scale[start : start + 4] = 0.7
    assert moments(flow_sde, noise_scale, grid_c(25), 1.0)[1][-1] == pytest.approx(
        expected, abs=6e-4
    )


@pytest.mark.parametrize(("transition", "noise_scale"), [(flow_sde, 0.7), (dance_sde, 0.3)])
@pytest.mark.parametrize("window", [slice(0, 2000), slice(0, 800), slice(600, 1500)])
def test_euler_maruyama_keeps_marginals_in_the_limit(
    transition: Transition, noise_scale: float, window: slice
) -> None:
    """N=2000, exact velocity: by the Fokker-Planck equation every marginal stays; to 1 % here.

    Marginals above sigma = 0.9 are left out: flow_sde's first std is `noise_scale` however small
    the step is, which leaves an excess of noise_scale^4 / 4 (closed form) that later steps forget
    only gradually.
    """
    noise_scales = torch.zeros(2000).double()
    noise_scales[window] = noise_scale
    sigmas = grid_c(2000)
    variances = torch.tensor(
        moments(transition, noise_scales, sigmas, 0.25)[1], dtype=torch.float64
    )
    target = (1 - sigmas[1:]).square() * 0.25 + sigmas[1:].square()
    excess = (variances / target - 1).abs()
    assert float(excess[sigmas[1:] < 0.9].max()) < 0.01
    if transition is flow_sde and float(noise_scales[0]) > 0:
        assert float(excess[0]) == pytest.approx(noise_scale**4 / 4, rel=0.02)


def test_cps_loses_variance_even_in_the_limit() -> None:
    """N -> infinity: (1 + cos(h pi / 2)) / 2 = .6545 of the data's variance for h = .8; measured
    .6535 at N=20000."""
    got = final_variance(cps, 0.8, 20000, 1.0)
    assert got == pytest.approx((1 + math.cos(0.4 * math.pi)) / 2, abs=0.01)
    assert got == pytest.approx(0.6535, abs=1e-4)


@pytest.mark.parametrize(("transition", "noise_scale"), [(dance_sde, 0.0), (cps, 0.8)])
def test_point_data_carry_exactly_the_noise_of_the_grid(
    transition: Transition, noise_scale: float
) -> None:
    """Data variance 0: x_sigma has std sigma, and c^2 + std^2 = sigma_next^2 keeps it."""
    sigmas = grid_c(16)
    variances = moments(transition, torch.full((16,), noise_scale).double(), sigmas, 0.0)[1]
    assert [math.sqrt(v) for v in variances] == pytest.approx(sigmas[1:].tolist(), abs=1e-7)


def test_point_data_under_flow_sde_carry_too_much() -> None:
    """Excess per step, closed form: std^2 D / sigma + std^4 / (4 sigma^2)."""
    sigmas = grid_c(16)
    s, s_next, ones = sigmas[:-1], sigmas[1:], torch.ones(16, 1).double()
    step = flow_sde(s[:, None] * ones, ones, s, s_next, torch.full((16,), 0.7).double())
    s2 = step.std.square()
    excess = step.mean[:, 0].square() + s2 - s_next.square()
    torch.testing.assert_close(excess, s2 * (s - s_next) / s + s2.square() / (4 * s.square()))


@pytest.mark.parametrize(
    ("transition", "noise_scale", "by_hand"),
    [
        (flow_sde, 0.7, lambda s, n: -(1 + 0.49 / 2) * (s - n)),
        (dance_sde, 0.3, lambda s, n: -(s - n) * (1 + 0.09 * (1 - s) / (2 * s))),
        (cps, 0.8, lambda s, n: -((1 - n) * s - n * math.cos(0.4 * math.pi) * (1 - s))),
    ],
)
def test_slope_of_the_mean_in_v(
    transition: Transition, noise_scale: float, by_hand: Callable[[float, float], float]
) -> None:
    """d mean / d v as differentiated by hand."""
    v = one(0.3)[None].requires_grad_()
    transition(one(0.8)[None], v, one(0.7), one(0.5), one(noise_scale)).mean.sum().backward()
    assert v.grad is not None
    assert float(v.grad) == pytest.approx(by_hand(0.7, 0.5), abs=1e-12)


def test_log_prob_is_the_mean_of_normal_log_probs() -> None:
    """Oracle: torch.distributions."""
    torch.manual_seed(0)
    x, mean, std = torch.randn(3, 2, 5), torch.randn(3, 2, 5), torch.tensor([0.1, 1.0, 3.0])
    oracle = Normal(mean, std[:, None, None].expand_as(mean)).log_prob(x).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), oracle, rtol=1e-6, atol=1e-6)


def test_kl_is_the_mean_of_normal_kls() -> None:
    """Oracle: torch.distributions."""
    torch.manual_seed(0)
    mean, ref, std = torch.randn(3, 2, 5), torch.randn(3, 2, 5), torch.tensor([0.1, 1.0, 3.0])
    wide_std = std[:, None, None].expand_as(mean)
    oracle = kl_divergence(Normal(mean, wide_std), Normal(ref, wide_std)).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(mean, ref, std), oracle)


def test_log_ratio_has_the_predicted_drift_and_spread() -> None:
    """With x_next from the old policy, E = -m/2 and SD = sqrt(m / D), m = mean(gap^2) / std^2:
    closed form."""
    generator = torch.Generator().manual_seed(0)
    rows, dims, std = 2000, 256, torch.full((2000,), 0.4).double()
    old = torch.zeros(rows, dims, dtype=torch.float64)
    gap = 0.02 * torch.randn(dims, generator=generator, dtype=torch.float64)
    x = draw(Gaussian(old, std), torch.randn(rows, dims, generator=generator, dtype=torch.float64))
    got = gaussian_log_prob(x, old - gap, std) - gaussian_log_prob(x, old, std)
    m = float(gap.square().mean()) / 0.16
    spread = math.sqrt(m / dims)
    assert float(got.mean()) == pytest.approx(-m / 2, abs=3 * spread / math.sqrt(rows))
    assert float(got.std()) == pytest.approx(spread, rel=3 / math.sqrt(2 * rows))


def test_kernels_take_any_schedule() -> None:
    """The named steps are their kernels with the schedules of their papers."""
    x, v, s, n = one(0.8)[None], one(-0.5)[None], one(0.7), one(0.5)
    assert torch.equal(
        dance_sde(x, v, s, n, one(0.3)).mean, euler_maruyama(x, v, s, n, one(0.3)).mean
    )
    g = 0.7 * (s / (1 - s)).sqrt()
    torch.testing.assert_close(
        flow_sde(x, v, s, n, one(0.7)).mean, euler_maruyama(x, v, s, n, g).mean
    )
    std = n * math.sin(0.4 * math.pi)
    torch.testing.assert_close(
        cps(x, v, s, n, one(0.8)).mean, coefficient_preserving(x, v, s, n, std).mean
    )


# ----------------------------- DDIM: the same step in the coordinates of variance-preserving models


def vp_step(x: Tensor, eps: Tensor, a_t: Tensor, a_p: Tensor, eta: float) -> Gaussian:
    """Take DDIM's step in its own coordinates, from the cumulative alphas [B] (2010.02502 eq. 12
    and 16)."""
    x0 = (x - (1 - a_t).sqrt()[:, None] * eps) / a_t.sqrt()[:, None]
    var = eta**2 * (1 - a_p) / (1 - a_t) * (1 - a_t / a_p)
    return Gaussian(a_p.sqrt()[:, None] * x0 + (1 - a_p - var).sqrt()[:, None] * eps, var.sqrt())


def flow_step(
    x: Tensor, eps: Tensor, a_t: Tensor, a_p: Tensor, eta: float
) -> tuple[Gaussian, Tensor]:
    """Take `ddim` on the flow path and rescale the result back; also return the factor alpha + s
    [B] after the step."""
    x_flow, sigma = flow_from_vp(x, a_t.sqrt(), (1 - a_t).sqrt())
    after = a_p.sqrt() + (1 - a_p).sqrt()
    sigma_next = (1 - a_p).sqrt() / after
    v = velocity_from_eps(x_flow, eps, sigma)
    mean, std = ddim(x_flow, v, sigma, sigma_next, torch.full_like(sigma, eta))
    return Gaussian(mean * after[:, None], std * after), after


def test_ddim_reference_fixture() -> None:
    """a_t=.5, a_p=.7, x=.3, eps=.4, eta=1: numpy float64 values of the reference."""
    got, _ = flow_step(one(0.3)[None], one(0.4)[None], one(0.5), one(0.7), 1.0)
    assert (float(got.mean), float(got.std)) == pytest.approx(
        (0.1637282095, 0.4140393356), abs=1e-10
    )
    assert float(gaussian_log_prob(one(0.5)[None], *got)) == pytest.approx(-0.3669571619, abs=1e-10)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_ddim_has_the_scheduler_s_mean_and_std(eta: float) -> None:
    """DDIMScheduler.step with noise 0 and 1, for every step of a grid; its alphas are float32
    numbers."""
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False
    )
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    scheduler.set_timesteps(20)
    torch.manual_seed(0)
    t = scheduler.timesteps
    a_t, a_p = scheduler.alphas_cumprod[t], torch.cat([scheduler.alphas_cumprod[t[1:]], one(1.0)])
    x, eps = torch.randn(2, 20, 6, dtype=torch.float64)
    got, _ = flow_step(x, eps, a_t, a_p, eta)
    noise = [
        torch.cat(
            [
                scheduler.step(eps[[k]], int(t[k]), x[[k]], eta, variance_noise=z).prev_sample
                for k in range(20)
            ]
        )
        for z in torch.tensor([0.0, 1.0]).double()[:, None, None]
    ]
    torch.testing.assert_close(got.mean, noise[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        got.std[:, None].expand(20, 6), noise[1] - noise[0], rtol=0, atol=1e-10
    )
    assert float(got.std[-1]) == 0 and (eta == 0 or float(got.std[:-1].min()) > 0.005)


def test_ddim_log_ratios_do_not_depend_on_the_coordinates() -> None:
    """The factor alpha + s shifts each log-prob by its logarithm, for every policy alike."""
    torch.manual_seed(0)
    a_t, a_p = torch.tensor([0.0047, 0.3, 0.9]).double(), torch.tensor([0.02, 0.5, 0.99]).double()
    x, old, new, z = torch.randn(4, 3, 50, dtype=torch.float64)
    states = [
        (vp_step(x, eps, a_t, a_p, 0.7), flow_step(x, eps, a_t, a_p, 0.7))
        for eps in (old, old + 0.1 * new)
    ]
    after = states[0][1][1]
    x_next = draw(states[0][0], z)
    vp = [gaussian_log_prob(x_next, *state) for state, _ in states]
    flow = [
        gaussian_log_prob(x_next / after[:, None], g.mean / after[:, None], g.std / after)
        for _, (g, _) in states
    ]
    assert float((vp[1] - vp[0]).abs().min()) > 1e-3
    torch.testing.assert_close(flow[1] - flow[0], vp[1] - vp[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flow[0] - vp[0], after.log(), rtol=1e-9, atol=1e-9)


def test_ddim_at_full_eta_and_at_pure_noise() -> None:
    """eta = 1 keeps sigma' q of the noise, DDPM's posterior; at sigma = 1, q = 0 and all noise is
    fresh."""
    ones = torch.ones(2, 1).double()
    s, n = (
        torch.tensor([0.8, 1.0], dtype=torch.float64),
        torch.tensor([0.5, 0.9], dtype=torch.float64),
    )
    step = ddim(
        s[:, None] * ones, ones, s, n, torch.ones(2).double()
    )  # x0 = 0, eps = 1: the mean is c
    q = n * (1 - s) / (s * (1 - n))
    torch.testing.assert_close(step.mean[:, 0], n * q, rtol=0, atol=1e-7)
    torch.testing.assert_close(step.std, n * (1 - q.square()).sqrt())
    assert float(step.std[1]) == 0.9
