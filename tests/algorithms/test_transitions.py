"""The kernels against closed forms: moments, special cases, densities; DDIM in the coordinates of
variance-preserving models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from sigmakit import static_grid
from torch import Tensor
from torch.distributions import Normal

from flowrl.algorithms.transitions import (
    cps,
    dance_sde,
    ddim,
    draw,
    euler,
    flow_sde,
    gaussian_log_prob,
)
from flowrl.core.noise_path import flow_from_vp, shift_sigmas, velocity_from_eps, x0_from
from flowrl.core.types import Gaussian, Transition
from flowrl.models.toy import GaussianFlow

ALL = [flow_sde, dance_sde, cps, ddim]


def grid_c(steps: int) -> Tensor:
    return shift_sigmas(torch.linspace(1, 0, steps + 1, dtype=torch.float64), 3.0)


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def noise_alone(transition: Transition, sigma: Tensor, sigma_next: Tensor, scale: Any) -> Gaussian:
    """Step from x0 = 0, eps = 1, so that the mean [B] is the share of the noise that stays."""
    ones = torch.ones(len(sigma), 1, dtype=torch.float64)
    step = transition(sigma[:, None] * ones, ones, sigma, sigma_next, scale * ones[:, 0])
    return Gaussian(step.mean[:, 0], step.std)


def moments(
    transition: Transition, noise_scale: Tensor | float, sigmas: Tensor, variance: float
) -> tuple[list[float], list[float]]:
    """Push N(0, 1) noise through the steps exactly -> mean and variance after each step, data
    N(0.5, variance).

    With the exact velocity of Gaussian data every step is affine in x, so its two coefficients are
    read off at x = 0 and x = 1, all steps in one batch.
    """
    model = GaussianFlow(mean=0.5, variance=variance)
    sigma, sigma_next = sigmas[:-1], sigmas[1:]
    scale = noise_scale * torch.ones_like(sigma)

    def at(value: float) -> Gaussian:
        x = torch.full((len(sigma), 1), value, dtype=torch.float64)
        return transition(x, model.velocity(x, sigma, {}), sigma, sigma_next, scale)

    offset = at(0.0).mean[:, 0]
    slope = (at(1.0).mean[:, 0] - offset).tolist()
    m, s2, means, variances = 0.0, 1.0, [], []
    for a, b, std in zip(slope, offset.tolist(), at(0.0).std.tolist(), strict=True):
        m, s2 = a * m + b, a * a * s2 + std * std
        means.append(m)
        variances.append(s2)
    return means, variances


@pytest.mark.parametrize(
    ("transition", "mean", "std"),
    [(flow_sde, 0.7938333, 0.4781910), (dance_sde, 0.8545, 0.3130495), (cps, 0.7225469, 0.4455033)],
)
def test_reference_fixture(transition: Transition, mean: float, std: float) -> None:
    """x=.8, v=-.5, sigma .7 -> .5, noise_scale .7: numpy float64 values of the reference."""
    got = transition(one(0.8)[None], one(-0.5)[None], one(0.7), one(0.5), one(0.7))
    assert (float(got.mean), float(got.std)) == pytest.approx((mean, std), abs=1e-7)
    if transition is flow_sde:
        log_prob = float(gaussian_log_prob(one(0.9)[None], *got))
        assert log_prob == pytest.approx(-0.2058394, abs=1e-7)


@pytest.mark.parametrize("transition", ALL)
def test_level_zero_is_the_euler_step_to_the_bit(transition: Transition) -> None:
    torch.manual_seed(0)
    sigmas = static_grid(10)
    x, v = torch.randn(2, 10, 3, 4)
    step = transition(x, v, sigmas[:-1], sigmas[1:], torch.zeros(10))
    assert torch.equal(step.mean, euler(x, v, sigmas[:-1], sigmas[1:]))
    assert torch.equal(step.mean, x - (sigmas[:-1] - sigmas[1:])[:, None, None] * v)
    assert torch.equal(step.std, torch.zeros(10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transition", [flow_sde, dance_sde])
def test_three_algebraic_forms_agree(transition: Transition, dtype: torch.dtype) -> None:
    """The score form, the (x0, eps) form and the (x, v) form, written out independently."""
    torch.manual_seed(0)
    s, n = torch.tensor([[0.9, 0.5, 0.2], [0.7, 0.3, 0.0]], dtype=dtype)[:, :, None]
    x, v = torch.randn(2, 3, 5, dtype=dtype)
    a = torch.full((3, 1), 0.7, dtype=dtype)
    got = transition(x, v, s[:, 0], n[:, 0], a[:, 0])
    d = s - n
    g = a * (s / (1 - s)).sqrt() if transition is flow_sde else a
    std = g * d.sqrt()
    x0, eps = x - s * v, x + (1 - s) * v
    score = -(x - (1 - s) * x0) / s.square()
    by_score = x - d * v + 0.5 * g.square() * score * d
    by_ends = (1 - n) * x0 + (n - std.square() / (2 * s)) * eps
    by_xv = x * (1 - g.square() * d / (2 * s)) - v * (1 + g.square() * (1 - s) / (2 * s)) * d
    for form in (by_score, by_ends, by_xv):
        torch.testing.assert_close(got.mean, form, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.std, std[:, 0])


def test_cps_keeps_the_coefficients_and_equals_its_direct_form() -> None:
    """c^2 + std^2 = sigma_next^2 and mean = (1 - sigma_next) x0 + c eps: the definition of the
    method."""
    torch.manual_seed(0)
    s, n, h = one(0.9).expand(4), torch.tensor([0.8, 0.5, 0.1, 0.0]).double(), one(0.8).expand(4)
    c, std = noise_alone(cps, s, n, 0.8)
    torch.testing.assert_close(c.square() + std.square(), n.square(), atol=1e-7, rtol=0)
    assert float(std[-1]) == 0
    x, v = torch.randn(2, 4, 3).double()
    x0, eps = x - s[:, None] * v, x + (1 - s)[:, None] * v
    direct = (1 - n)[:, None] * x0 + (n * torch.cos(h * math.pi / 2))[:, None] * eps
    torch.testing.assert_close(cps(x, v, s, n, h).mean, direct)


def test_flow_sde_per_step_constants_on_the_sd3_grid() -> None:
    """g, std, c of every step, N=10, noise_scale .7: the reference table, derived in numpy
    float64."""
    sigmas = static_grid(10).double()
    c, std = noise_alone(flow_sde, sigmas[:-1], sigmas[1:], 0.7)
    table = {
        "std": [0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254, 0.0063],
        "g": [3.5057, 3.4351, 2.2726, 1.7185, 1.3592, 1.0881, 0.8612, 0.6524, 0.4344, 0.0664],
        "c": [0.7151, 0.6259, 0.7003, 0.6745, 0.6102, 0.5142, 0.3803, 0.1925, -0.0824, -0.0022],
        "total": [1.0007, 0.9715, 0.8820, 0.8085, 0.7251, 0.6236, 0.4965, 0.3415, 0.2400, 0.0067],
    }
    g = std / (sigmas[:-1] - sigmas[1:]).sqrt()
    found = {"std": std, "g": g, "c": c, "total": torch.hypot(c, std)}
    for name, values in table.items():
        assert found[name].tolist() == pytest.approx(values, abs=6e-5), name
    # 1 / mean(std) over the nine trained steps: TempFlow-GRPO's published weight 2.25
    assert 1 / float(std[:9].mean()) == pytest.approx(2.252, abs=5e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transition", ALL)
def test_half_precision_is_computed_in_float32(transition: Transition, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 2, 4).to(dtype)
    rest = (torch.tensor([0.9, 0.6]), torch.tensor([0.8, 0.4]), torch.full((2,), 0.5))
    got, wanted = transition(x, v, *rest), transition(x.float(), v.float(), *rest)
    assert got.mean.dtype == torch.float32 and torch.equal(got.mean, wanted.mean)
    assert gaussian_log_prob(x, *got).dtype == torch.float64


# ----------------------------------------------------------------------- variance of what comes out

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
    got = [moments(t, scale, grid_c(steps), variance) for t, scale in cases]
    assert [variances[-1] for _, variances in got] == pytest.approx(
        [ode, flow, dance, kept], abs=6e-4 if variance > 0.1 else 6e-5
    )
    assert got[-1][0][-1] == pytest.approx(0.5)


@pytest.mark.parametrize(("start", "expected"), [(0, 0.953), (5, 0.881), (12, 0.878), (19, 0.872)])
def test_final_variance_with_a_window(start: int, expected: float) -> None:
    """MixGRPO, N=25, noise_scale .7, four noisy steps, data variance 1: reference values."""
    noise_scale = torch.zeros(25).double()
    noise_scale[start : start + 4] = 0.7
    found = moments(flow_sde, noise_scale, grid_c(25), 1.0)[1][-1]
    assert found == pytest.approx(expected, abs=6e-4)


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
    scales, sigmas = torch.zeros(2000).double(), grid_c(2000)
    scales[window] = noise_scale
    variances = torch.tensor(moments(transition, scales, sigmas, 0.25)[1], dtype=torch.float64)
    target = (1 - sigmas[1:]).square() * 0.25 + sigmas[1:].square()
    excess = (variances / target - 1).abs()
    assert float(excess[sigmas[1:] < 0.9].max()) < 0.01
    if transition is flow_sde and float(scales[0]) > 0:
        assert float(excess[0]) == pytest.approx(noise_scale**4 / 4, rel=0.02)


def test_cps_loses_variance_even_in_the_limit() -> None:
    """N -> infinity: (1 + cos(h pi / 2)) / 2 = .6545 of the data's variance for h = .8; measured
    .6535 at N=20000."""
    got = moments(cps, 0.8, grid_c(20000), 1.0)[1][-1]
    assert got == pytest.approx((1 + math.cos(0.4 * math.pi)) / 2, abs=0.01)
    assert got == pytest.approx(0.6535, abs=1e-4)


@pytest.mark.parametrize(("transition", "noise_scale"), [(dance_sde, 0.0), (cps, 0.8)])
def test_point_data_carry_exactly_the_noise_of_the_grid(
    transition: Transition, noise_scale: float
) -> None:
    """Data variance 0: x_sigma has std sigma, and c^2 + std^2 = sigma_next^2 keeps it."""
    sigmas = grid_c(16)
    variances = torch.tensor(moments(transition, noise_scale, sigmas, 0.0)[1]).double()
    torch.testing.assert_close(variances.sqrt(), sigmas[1:], atol=1e-7, rtol=0)


def test_point_data_under_flow_sde_carry_too_much() -> None:
    """Excess per step, closed form: std^2 D / sigma + std^4 / (4 sigma^2)."""
    s, n = grid_c(16)[:-1], grid_c(16)[1:]
    c, std = noise_alone(flow_sde, s, n, 0.7)
    excess = c.square() + std.square() - n.square()
    wanted = std.square() * (s - n) / s + std**4 / (4 * s.square())
    torch.testing.assert_close(excess, wanted)


# -------------------------------------------------------------------------------------- densities


def test_log_prob_is_the_mean_over_dimensions_of_torch_distributions() -> None:
    torch.manual_seed(0)
    x, mean = torch.randn(2, 3, 2, 5)
    std = torch.tensor([0.1, 1.0, 3.0])
    wide = Normal(mean.double(), std.double()[:, None, None].expand_as(mean))
    oracle = wide.log_prob(x.double()).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), oracle)


@pytest.mark.parametrize("shift", [1e-5, 1e-4, 1e-2])
def test_log_ratio_of_a_tiny_shift_has_no_noise_of_rounding(shift: float) -> None:
    """Means in float32, as networks give them. Oracle: the exact sum of ``(new - old) (2 x - new -
    old) / (2 std^2)`` by `math.fsum`. With log-probs in float32 half of the ratios were off by more
    than 85 %, 5.8 % and 0.07 %."""
    torch.manual_seed(0)
    x, old, way = torch.randn(3, 16, 16 * 32 * 32)
    new, std = old + shift * way, torch.full((16,), 0.35)
    got = gaussian_log_prob(x, new, std) - gaussian_log_prob(x, old, std)
    a, b, c = new.double(), old.double(), x.double()
    terms = (a - b) * (2 * c - a - b) / (2 * std.double()[:, None].square())
    exact = torch.tensor([math.fsum(row) / len(row) for row in terms.tolist()]).double()
    assert float(((got - exact) / exact).abs().max()) < 1e-5


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


def vp_step(x: Tensor, eps: Tensor, a_t: Tensor, a_p: Tensor, eta: float) -> Gaussian:
    """Take `ddim` on the flow path from the cumulative alphas [B], and rescale the result back."""
    x_flow, sigma = flow_from_vp(x, a_t.sqrt(), (1 - a_t).sqrt())
    after = a_p.sqrt() + (1 - a_p).sqrt()
    v = velocity_from_eps(x_flow, eps, sigma)
    step = ddim(x_flow, v, sigma, (1 - a_p).sqrt() / after, torch.full_like(sigma, eta))
    return Gaussian(step.mean * after[:, None], step.std * after)


def test_ddim_reference_fixture() -> None:
    """a_t=.5, a_p=.7, x=.3, eps=.4, eta=1: numpy float64 values of the reference."""
    got = vp_step(one(0.3)[None], one(0.4)[None], one(0.5), one(0.7), 1.0)
    log_prob = float(gaussian_log_prob(one(0.5)[None], *got))
    found = (float(got.mean), float(got.std), log_prob)
    assert found == pytest.approx((0.1637282095, 0.4140393356, -0.3669571619), abs=1e-10)
    # its estimate of the clean latent, (x - sqrt(1 - a_t) eps) / sqrt(a_t), on the flow path
    x_flow, sigma = flow_from_vp(one(0.3)[None], one(0.5).sqrt(), one(0.5).sqrt())
    x0 = x0_from(x_flow, velocity_from_eps(x_flow, one(0.4)[None], sigma), sigma)
    assert float(x0) == pytest.approx(0.0242640687, abs=1e-10)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_ddim_has_the_scheduler_s_mean_and_std(eta: float) -> None:
    """DDIMScheduler.step with noise 0 and 1, for every step of a grid; its alphas are float32
    numbers."""
    betas: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012}
    scheduler = DDIMScheduler(**betas, beta_schedule="scaled_linear", clip_sample=False)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.double()
    scheduler.set_timesteps(20)
    torch.manual_seed(0)
    t = scheduler.timesteps
    a_t, a_p = scheduler.alphas_cumprod[t], torch.cat([scheduler.alphas_cumprod[t[1:]], one(1.0)])
    x, eps = torch.randn(2, 20, 6, dtype=torch.float64)
    got, theirs = vp_step(x, eps, a_t, a_p, eta), []
    for z in torch.tensor([[[0.0]], [[1.0]]]).double():
        step = [
            scheduler.step(eps[[k]], int(t[k]), x[[k]], eta, variance_noise=z) for k in range(20)
        ]
        theirs.append(torch.cat([result.prev_sample for result in step]))
    torch.testing.assert_close(got.mean, theirs[0], rtol=0, atol=1e-10)
    std = (theirs[1] - theirs[0])[:, 0]
    torch.testing.assert_close(got.std, std, rtol=0, atol=1e-10)
    assert float(got.std[-1]) == 0 and (eta == 0 or float(got.std[:-1].min()) > 0.005)


def test_ddim_at_full_eta_and_at_pure_noise() -> None:
    """eta = 1 keeps sigma' q of the noise, DDPM's posterior; at sigma = 1, q = 0 and all noise is
    fresh."""
    s, n = torch.tensor([[0.8, 1.0], [0.5, 0.9]], dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    mean, std = ddim(s[:, None] * ones, ones, s, n, ones[:, 0])  # x0 = 0, eps = 1
    q = n * (1 - s) / (s * (1 - n))
    torch.testing.assert_close(mean[:, 0], n * q, rtol=0, atol=1e-7)
    torch.testing.assert_close(std, n * (1 - q.square()).sqrt())
    assert float(std[1]) == 0.9
