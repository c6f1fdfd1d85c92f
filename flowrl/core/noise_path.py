"""The path between data and noise, ``x_sigma = (1 - sigma) x0 + sigma eps``: pure algebra on it,
and sigma grids."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype of the arithmetic: float32, or float64 if it came so. bf16 and fp16
    lose the ratio."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def length_ratio(v: Tensor, ref: Tensor) -> Tensor:
    """Return the L2 length of each of v [B, *] over that of ref [B, *] -> [B], at least float32."""
    length, before = (wide(rows).flatten(1).norm(dim=1) for rows in (v, ref))
    return length / before.clamp_min(torch.finfo(before.dtype).tiny)


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values [B] to [B, 1, ...] so that they broadcast over the latents `like` [B, *], in
    its dtype."""
    return values.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def interpolate(x0: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
    """Noise data x0 [B, *] with eps [B, *] to the level sigma [B] in [0, 1] -> x [B, *]."""
    s = per_sample(sigma, x0)
    return (1 - s) * x0 + s * eps


def x0_from(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Estimate the clean latent ``x - sigma v`` -> [B, *]."""
    return x - per_sample(sigma, x) * v


def eps_from(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Estimate the noise ``x + (1 - sigma) v`` -> [B, *]."""
    return x + (1 - per_sample(sigma, x)) * v


def velocity_from_eps(x: Tensor, eps: Tensor, sigma: Tensor) -> Tensor:
    """Turn a noise prediction at the flow latent x [B, *] into ``v = (eps - x) / (1 - sigma)``;
    sigma [B] below 1."""
    return (eps - x) / (1 - per_sample(sigma, x))


def flow_from_vp(x_vp: Tensor, alpha: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale a variance-preserving latent ``x_vp = alpha x0 + s eps`` exactly onto the flow path.

    ``sigma = s / (alpha + s)``, ``x = x_vp / (alpha + s)``. The factor is the same for every
    policy, so log-ratios of transitions do not change.

    Args: x_vp [B, *]; alpha, s [B]. Returns: x [B, *], sigma [B].
    """
    total = alpha + s
    return x_vp / per_sample(total, x_vp), s / total


def vp_from_flow(x: Tensor, sigma: Tensor) -> Tensor:
    """Invert `flow_from_vp` for ``alpha^2 + s^2 = 1``: ``x_vp = x / sqrt((1 - sigma)^2 + sigma^2)``
    -> [B, *]."""
    return x / per_sample(torch.hypot(1 - sigma, sigma), x)


def shift_sigmas(u: Tensor, shift: float) -> Tensor:
    """Move time towards noise: ``S(u; s) = s u / (1 + (s - 1) u)``; s = 1 leaves u as it is. Raises
    ConfigError."""
    if not shift > 0:
        raise ConfigError(
            f"a time shift must be a number above 0, got {shift}; 1 is no shift, SD3 uses 3"
        )
    return shift * u / (1 + (shift - 1) * u)


def linear_grid(steps: int, shift: float = 1.0) -> Tensor:
    """Return ``S(linspace(1, 0, steps + 1); shift)`` [steps+1], the grid of the DanceGRPO code
    family."""
    return shift_sigmas(
        torch.linspace(1, 0, _positive(steps) + 1, dtype=torch.float64), shift
    ).float()


def _positive(steps: int) -> int:
    if steps < 1:
        raise ConfigError(f"a sigma grid needs at least 1 step, got steps={steps}")
    return steps
