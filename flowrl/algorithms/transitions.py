"""One denoising step as a Gaussian: two kernels, four noise schedules, and their densities.

Every step is ``x_next = (1 - sigma_next) x0 + c eps + std z`` with x0, eps estimated from (x, v).
Euler has ``c = sigma_next, std = 0``. Arithmetic is in float32 whatever the network's dtype
(float64 stays float64); log-probs are float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.core.noise_path import eps_from, per_sample, wide
from flowrl.core.types import Gaussian

PURE = 1 - 1e-4  # sigmas from here on are pure noise


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Take the ODE step ``x - (sigma - sigma_next) v`` -> [B, *]; sigma, sigma_next [B]."""
    x = wide(x)
    return x - per_sample(sigma - sigma_next, x) * v.to(x.dtype)


def euler_maruyama(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Gaussian:
    """Step the SDE that has the ODE's marginals, with diffusion coefficient g [B].

    mean = x - D v - g^2 D / (2 sigma) eps, std = g sqrt(D), D = sigma - sigma_next; x, v [B, *];
    the rest [B]. Marginals are kept only as D -> 0 and for an exact v. Source: Flow-GRPO
    (2505.05470) eq. 9, in our symbols.
    """
    x, v = wide(x), v.to(wide(x).dtype)
    sigma, sigma_next, g = (s.to(x.dtype) for s in (sigma, sigma_next, g))
    delta = sigma - sigma_next
    pull = per_sample(g.square() * delta / (2 * sigma), x)
    mean = euler(x, v, sigma, sigma_next) - pull * eps_from(x, v, sigma)
    return Gaussian(mean, g * delta.sqrt())


def coefficient_preserving(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, std: Tensor
) -> Gaussian:
    """Replace the part ``std`` [B] <= sigma_next of the predicted noise by fresh noise.

    mean = (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) eps; x, v [B, *]; the rest [B]. Source:
    Flow-CPS (2509.05952); DDIM with eta is the same step in variance-preserving coordinates.
    **Differs:** the paper says that marginals are kept. The coefficients are; the marginal is only
    for point data (for Gaussian data the variance falls to ``(1 + cos(noise_scale pi / 2)) / 2`` of
    the target).
    """
    x = wide(x)
    v, sigma, sigma_next = v.to(x.dtype), sigma.to(x.dtype), sigma_next.to(x.dtype)
    std = std.to(x.dtype)
    kept = ((sigma_next - std) * (sigma_next + std)).sqrt()
    # sigma_next - kept, written without cancellation, so that std = 0 is the Euler step to the last
    # bit
    lost = std.square() / (kept + sigma_next).clamp_min(torch.finfo(x.dtype).tiny)
    mean = euler(x, v, sigma, sigma_next) - per_sample(lost, x) * eps_from(x, v, sigma)
    return Gaussian(mean, std)


def flow_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor
) -> Gaussian:
    """Take Flow-GRPO's step: Euler-Maruyama with ``g = noise_scale sqrt(sigma / (1 - sigma))``;
    noise_scale [B] (paper: 0.7).

    At sigma 1 the sigma inside ``1 - sigma`` is sigma_next, so that std is `noise_scale` there.
    Source: 2505.05470 eq. 9 and its code. **Differs:** its code asks for 1 exactly. Wan's grid
    starts at 0.999999, where g would be 700 noise scales; here all from `PURE` on counts as 1.
    """
    inside = torch.where(sigma >= PURE, sigma_next, sigma)
    return euler_maruyama(x, v, sigma, sigma_next, noise_scale * (sigma / (1 - inside)).sqrt())


def dance_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor
) -> Gaussian:
    """Take DanceGRPO's step: Euler-Maruyama with the constant ``g = noise_scale`` [B] (2505.07818;
    paper: 0.3 on FLUX)."""
    return euler_maruyama(x, v, sigma, sigma_next, noise_scale.expand_as(sigma))


def linear_sde(
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_scale: Tensor,
    *,
    least: float = 0.0,
) -> Gaussian:
    """Take Flash-GRPO's step: Euler-Maruyama with ``g = least + (noise_scale - least) sigma``
    (2605.15980 and its code); noise_scale [B] is there the second sigma of the grid, least 0."""
    return euler_maruyama(x, v, sigma, sigma_next, least + (noise_scale - least) * sigma)


def stepwise_sde(
    x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor
) -> Gaussian:
    """Take Stepwise-Flow-GRPO's step: part of the predicted noise is fresh, ``std = noise_scale
    sigma_next sqrt(1 - sigma)`` (2603.28718). A step from pure noise, sigma from `PURE` on, has
    none: Wan's grid starts at 0.999999, whose std of 7e-4 would make log-ratios thousands of times
    as large as those of other steps. x, v [B, *]; sigmas [B], noise_scale [B] in [0, 1]."""
    std = noise_scale * sigma_next * (1 - sigma).sqrt()
    std = torch.where(sigma >= PURE, torch.zeros_like(std), std)
    return coefficient_preserving(x, v, sigma, sigma_next, std)


def cps(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor) -> Gaussian:
    """Take Flow-CPS' step: ``std = sigma_next sin(noise_scale pi / 2)``, noise_scale [B] in [0, 1];
    the last step has no noise.

    **Differs:** Flow-GRPO's CPS code scores it as ``-mean((x_next - mean)^2)``; flowrl uses the
    normalised density, so its log-ratios are ``1 / (2 std^2)`` times those, and clip ranges do not
    transfer.
    """
    return coefficient_preserving(
        x, v, sigma, sigma_next, sigma_next * torch.sin(noise_scale * (math.pi / 2))
    )


def ddim(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, noise_scale: Tensor) -> Gaussian:
    """Take DDIM's step with ``eta = noise_scale`` [B] in [0, 1]; 1 is DDPM's ancestral step (DDPO,
    DanceGRPO on SD1.4).

    std = eta sigma_next sqrt(1 - q^2), q = sigma_next (1 - sigma) / (sigma (1 - sigma_next)):
    DDIM's ``eta^2 (1-a_p)/(1-a_t) (1-a_t/a_p)``, over (alpha + s)^2 of sigma_next as `flow_from_vp`
    rescales. Source: DDIM (2010.02502) eq. 12, 16. The last step has no noise if it ends at sigma
    0.
    """
    sigma, sigma_next, eta = (s.to(wide(x).dtype) for s in (sigma, sigma_next, noise_scale))
    q = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
    gone = (sigma - sigma_next) / (sigma * (1 - sigma_next))  # 1 - q without cancellation
    return coefficient_preserving(
        x, v, sigma, sigma_next, eta * sigma_next * (gone * (1 + q)).sqrt()
    )


def draw(gaussian: Gaussian, noise: Tensor) -> Tensor:
    """Return the sample ``mean + std noise`` [B, *]."""
    return gaussian.mean + per_sample(gaussian.std, gaussian.mean) * noise


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Score x_next [B, *] under ``N(mean, std^2)``, std [B] above 0 -> [B] float64, nats per latent
    dimension.

    The MEAN over dimensions, not the sum (Flow-GRPO's convention): clip ranges of 1e-3 ... 1e-6
    belong to it. In float64, because the ratio is the difference of two such numbers near 1:
    float32 keeps them to 1e-7, which is a large part of a log-ratio of 1e-6.
    """
    mean, std = mean.double(), std.double()
    z = (x_next.double() - mean) / per_sample(std, mean)
    return -0.5 * z.square().flatten(1).mean(1) - std.log() - 0.5 * math.log(2 * math.pi)
