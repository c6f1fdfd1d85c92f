"""What the adapters of diffusers' pipelines share: flow matching's noise levels, guidance by two branches, decoding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from torch import Tensor

from flowrl.errors import ConfigError, ModelError
from flowrl.models.texts import halves
from flowrl.types import Cond

Network = Callable[[Tensor, Tensor, Cond], Tensor]
"""``network(x [B,*], sigma [B], cond) -> v [B,*]`` without guidance by two branches."""


def check_configs(pipeline: Any, path: str, *, channels: int) -> None:
    """Raise ModelError where the settings contradict what a FlowModel with ``channels`` latent channels promises."""
    scheduler, vae = pipeline.scheduler.config, pipeline.vae.config
    if scheduler.invert_sigmas or scheduler.stochastic_sampling:
        raise ModelError(
            f"{path}: scheduler with invert_sigmas or stochastic_sampling; flowrl needs the plain Euler one"
        )
    if vae.shift_factor is None or vae.scaling_factor is None:
        raise ModelError(f"{path}: vae/config.json must set scaling_factor and shift_factor")
    if vae.latent_channels != channels:
        got = f"{vae.latent_channels} and {channels}"
        raise ModelError(f"{path}: VAE and transformer must have the same number of latent channels, got {got}")


def check_size(height: int, width: int, *, unit: int) -> None:
    """Raise ModelError unless both are positive multiples of ``unit`` pixels."""
    if height < 1 or width < 1 or height % unit or width % unit:
        raise ModelError(f"height and width must be positive multiples of {unit} pixels, got {height} x {width}")


def check_guidance(guidance: float, negative_prompt: str | None) -> None:
    """Raise ConfigError unless the two fit together."""
    if not math.isfinite(guidance) or guidance < 0:
        raise ConfigError(f"guidance: expected a finite number of at least 0, got {guidance!r}")
    if negative_prompt and guidance <= 1:
        raise ConfigError(f"negative_prompt: has no effect unless guidance is above 1, got guidance {guidance!r}")


def check_decode_batch(decode_batch: int) -> None:
    """Raise ConfigError unless the VAE gets at least one picture at a time."""
    if decode_batch < 1:
        raise ConfigError(f"decode_batch: expected at least 1, got {decode_batch!r}")


def pipeline_sigmas(scheduler: Any, steps: int, *, tokens: int, device: torch.device, even: bool = False) -> Tensor:
    """Return the noise levels [S+1] that a pipeline's scheduler would use, float32 on the device, ending in 0.

    ``tokens`` of the picture decide the shift if the scheduler's config asks for one by resolution. ``even`` shifts
    ``linspace(1, 1/S, S)``, as FluxPipeline does; otherwise the scheduler spreads the steps over its own table.
    Raise ConfigError for fewer steps than one, or than the scheduler can spread.
    """
    if steps < 1:
        raise ConfigError(f"steps: expected at least 1, got {steps}")
    # set_timesteps writes into the scheduler; the pipeline's own must not change under a user who is sampling.
    scheduler, config = copy.deepcopy(scheduler), scheduler.config
    mu = None
    if config.use_dynamic_shifting:
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
    levels = np.linspace(1.0, 1 / steps, steps) if even else None
    scheduler.set_timesteps(steps, device=device, sigmas=levels, mu=mu)
    sigmas: Tensor = scheduler.sigmas
    if not bool(sigmas.isfinite().all()):
        raise ConfigError(
            f"steps: the model's scheduler makes noise levels that are no numbers of {steps} steps and {tokens} tokens;"
            " ask for more steps or a smaller picture"
        )
    return sigmas.to(device, torch.float32)


def guided(network: Network, scale: float, x: Tensor, sigma: Tensor, cond: Cond, *, rescale: float = 0.0) -> Tensor:
    """Return u + scale (c - u) [B,*] at x [B,*], sigma [B]; u is conditioned on the ``negative_`` rows of cond.

    Both halves run as one batch (u, c), and both are trained. ``rescale`` in [0, 1] moves the std of each row towards
    that of c (2305.08891 eq. 15-16).
    """
    negative, positive = halves(cond)
    both = {name: torch.cat([negative[name], rows]) for name, rows in positive.items()}
    u, c = network(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
    mixed = u + scale * (c - u)
    return rescale_noise_cfg(mixed, c, rescale) if rescale else mixed


def decode(pipeline: Any, x0: Tensor, *, decode_batch: int) -> Tensor:
    """Return pictures [B,3,H,W], float32 in [0,1], of latents [B,C,h,w]; ``decode_batch`` at a time."""
    vae = pipeline.vae
    latents = x0.to(vae.device, vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return pictures(pipeline, latents, decode_batch=decode_batch)


def pictures(pipeline: Any, latents: Tensor, *, decode_batch: int) -> Tensor:
    """Return pictures [B,3,H,W], float32 in [0,1], of what the VAE takes; ``decode_batch`` at a time."""
    parts = [pipeline.vae.decode(part, return_dict=False)[0] for part in latents.split(decode_batch)]
    pixels: Tensor = pipeline.image_processor.postprocess(torch.cat(parts), output_type="pt")
    return pixels.float()
