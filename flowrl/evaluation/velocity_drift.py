"""How far a model's velocity has moved from what it was before training."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.rollout.engine import noise_std
from flowrl.core.abilities import conditioning
from flowrl.core.seeds import generator
from flowrl.core.types import FlowModel, Source

PROMPTS = 4  # whose paths are looked at


class Given(NamedTuple):
    """What paths are made for: prompts [P], and what they start from, [P] or nothing."""

    texts: list[str]
    sources: list[Source] = []


class Probe(NamedTuple):
    """The paths of a few prompts under the base model: latents and velocities."""

    given: Given
    sigma: list[Tensor]  # [P] each, one per step
    x: list[Tensor]  # [P, C, h, w] each
    v: list[Tensor]  # [P, C, h, w] each


@torch.no_grad()
def take(
    model: FlowModel, given: Given, *, height: int, width: int, steps: int, seed: int
) -> Probe:
    """Follow the first `PROMPTS` of some prompts with Euler steps, from noise of their own, as
    large as a rollout's at the first sigma."""
    # a few paths are enough to see a drift
    given = Given(given.texts[:PROMPTS], given.sources[:PROMPTS])
    texts = given.texts
    grid = model.sigmas(steps, height, width)
    cond = conditioning(model, *given)
    device = next(iter(cond.values())).device if cond else torch.device("cpu")
    shape = model.latent_shape(height, width)
    # noise by place: the same whenever this is asked
    noise = []
    for place in range(len(texts)):
        noise.append(torch.randn(shape, generator=generator(seed, "drift", place)))
    x = torch.stack(noise).to(device) * noise_std(grid.tolist())
    probe = Probe(given, [], [], [])
    # latents are kept with the velocities, so that other weights can be asked at the same points
    for now, later in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        sigma = torch.full((len(texts),), now, device=device)
        v = model.velocity(x, sigma, cond).float()
        probe.sigma.append(sigma)
        probe.x.append(x)
        probe.v.append(v)
        x = x + (later - now) * v
    return probe


@torch.no_grad()
def velocity_drift(model: FlowModel, probe: Probe) -> float:
    """Return the size of the change of the velocity along the base model's paths, as a share of the
    base model's: ``sqrt(sum |v - v_base|^2 / sum |v_base|^2)``."""
    cond = conditioning(model, *probe.given)
    moved = torch.zeros((), dtype=torch.float64)
    size = torch.zeros((), dtype=torch.float64)
    for sigma, x, base in zip(probe.sigma, probe.x, probe.v, strict=True):
        v = model.velocity(x, sigma, cond).float()
        moved += (v - base).double().square().sum().cpu()
        size += base.double().square().sum().cpu()
    return float((moved / size.clamp_min(1e-30)).sqrt())
