"""Sigma grids of diffusers' pipelines in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.core.noise_path import shift_sigmas


def static_grid(steps: int, shift: float = 3.0, train_steps: int = 1000) -> Tensor:
    """Return the grid [steps+1] of diffusers' FlowMatchEulerDiscreteScheduler with a static shift
    (SD3, SD3.5).

    The smallest training sigma is already shifted and is then shifted again with the rest, so the
    last step is tiny. This is not ``linear_grid``; the difference is diffusers' own and models are
    sampled with it.
    """
    u = torch.tensor([1.0, 1.0 / train_steps], dtype=torch.float64)
    low = float(shift_sigmas(u, shift)[1])
    grid = shift_sigmas(torch.linspace(1, low, steps, dtype=torch.float64), shift)
    return torch.cat([grid, grid.new_zeros(1)]).float()


def dynamic_grid(steps: int, tokens: int) -> Tensor:
    """Return FLUX's grid [steps+1]: an exponential shift by ``mu = 0.5 + (tokens - 256) * 0.65 /
    3840``.

    ``sigma = e^mu / (e^mu + 1/u - 1)`` with ``u = linspace(1, 1/steps, steps)``, then 0; this is
    ``S(u; e^mu)``.
    """
    mu = 0.5 + (tokens - 256) * 0.65 / 3840
    grid = shift_sigmas(torch.linspace(1, 1 / steps, steps, dtype=torch.float64), math.exp(mu))
    return torch.cat([grid, grid.new_zeros(1)]).float()
