"""Read a model's sigma grid at fractional places, for samplers that take other steps than the
model's own."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import shift_sigmas
from flowrl.core.types import SigmaGrid


def read_sigma_grid(sigmas: Tensor, grid: SigmaGrid) -> Tensor:
    """Read the model's sigmas [N+1] at the places of `grid` -> [S+1] in their dtype, by linear
    interpolation in time.

    Time is u with ``sigma = S(u; shift) = shift u / (1 + (shift - 1) u)``. At whole places the
    model's own values come back to the last bit. Computed in float64.

    Raises: ConfigError if `sigmas` is another grid than the one the places belong to, or a place is
    outside of it.
    """
    places = grid.places.to(sigmas.device, torch.float64)
    if (
        len(sigmas) != grid.steps + 1
        or bool((places < 0).any())
        or bool((places > grid.steps).any())
    ):
        raise ConfigError(
            f"a grid of places from {places.min().item():g} to {places.max().item():g} of "
            f"{grid.steps} steps needs "
            f"{grid.steps + 1} sigmas and places from 0 to {grid.steps}, got {len(sigmas)} sigmas"
        )
    wide = sigmas.double()
    time = wide / (grid.shift - (grid.shift - 1) * wide)
    below = places.floor().long().clamp(max=grid.steps - 1)
    between = shift_sigmas(torch.lerp(time[below], time[below + 1], places - below), grid.shift)
    near = places.round()
    out = torch.where(places == near, sigmas[near.long()], between.to(sigmas.dtype))
    # the ends, where a solver cannot bear the model's own
    out = out.clamp(max=grid.first)
    if grid.halve_last:
        out[-2] = out[-3] / 2
    return out


def flash_places(steps: int, last: int, ratio: float) -> Tensor:
    """Keep the grid of `steps` steps up to the one after step `last`, then fewer even ones ->
    places [S+1] float64.

    The rest has ``n = int(max((steps - last) * ratio, 1))`` points, its first included: n - 1
    steps. 25 steps, last 3 and ratio 0.4 give 4 + 7 = 11 steps (MixGRPO-Flash, 2507.21802 and its
    code, where an n of 1 ends the sampling at a noisy image: an error here).

    Raises: ConfigError for `last` outside the steps, a ratio outside (0, 1], or one point left.
    """
    if not (0 <= last < steps and 0 < ratio <= 1):
        raise ConfigError(
            "a coarse grid after the window needs 0 <= last < steps and 0 < ratio <= 1, got the "
            "window's last step "
            f"last={last} of steps={steps} and ratio={ratio}"
        )
    # rounded as the published code does
    points = int(max((steps - last) * ratio, 1))
    if points < 2:
        raise ConfigError(
            f"a coarse grid after step last={last} of steps={steps} with ratio={ratio} has one "
            "point: (steps - last) * "
            f"ratio = {(steps - last) * ratio:g}, and sampling would stop at place {last + 1} of "
            f"{steps}; it needs "
            f"last <= {steps - 2 / ratio:g} or ratio >= 2 / {steps - last}"
        )
    # fine places up to the window's end, then even ones up to the clean image
    first = last + 1
    rest = first + torch.arange(1, points, dtype=torch.float64) * (steps - first) / (
        points - 1
    )  # the end is exact
    return torch.cat([torch.arange(first + 1, dtype=torch.float64), rest])
