"""DDIM: the same step in the coordinates of variance-preserving models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from torch import Tensor

from flowrl.algorithms.transitions import ddim, gaussian_log_prob
from flowrl.core.noise_path import flow_from_vp, velocity_from_eps, x0_from
from flowrl.core.types import Gaussian


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


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
