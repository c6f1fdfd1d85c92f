"""ODE solvers of higher order on the flow path, for steps without noise."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.transitions import euler
from flowrl.core.noise_path import per_sample, wide, x0_from


def dpmpp_2m(
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    past_x0: Tensor | None = None,
    past_sigma: Tensor | None = None,
) -> Tensor:
    """Take a step of DPM-Solver++ (2M, midpoint) with the x0 estimate of the step before -> x_next
    [B, *].

    With ``lambda = ln((1 - sigma) / sigma)``, ``h = lambda_next - lambda`` and the x0 estimate ``D
    = x - sigma v``, it is the first-order step ``(sigma_next / sigma) x - (1 - sigma_next) (e^-h -
    1) D`` with ``D + (D - past_x0) h / (2 h_past)`` in the place of D (DPM-Solver++, 2211.01095;
    MixGRPO-Flash, 2507.21802). On this path the first order is Euler's step. That is taken without
    a past, at sigma 1 and towards sigma 0, where h is infinite.

    Args: x, v, past_x0 [B, *]; sigma, sigma_next, past_sigma [B], past_sigma > sigma > sigma_next.
    float32 or wider.
    """
    x = wide(x)
    first = euler(x, v, sigma, sigma_next)
    if past_x0 is None or past_sigma is None:
        return first
    sigma, sigma_next, past_sigma = (s.to(x.dtype) for s in (sigma, sigma_next, past_sigma))
    h, h_past = _log_snr_gain(sigma, sigma_next), _log_snr_gain(past_sigma, sigma)
    ahead = torch.where(
        (sigma < 1) & (sigma_next > 0), h / (2 * h_past), 0
    )  # h_past is infinite after sigma 1
    bend = per_sample((sigma - sigma_next) / sigma * ahead, x)
    return first + bend * (x0_from(x, v.to(x.dtype), sigma) - past_x0.to(x.dtype))


def _log_snr_gain(sigma: Tensor, sigma_next: Tensor) -> Tensor:
    # lambda_next - lambda, written as one logarithm without cancellation
    return torch.log1p((sigma - sigma_next) / (sigma_next * (1 - sigma)))
