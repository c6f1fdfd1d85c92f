"""Latents of a Wan model beside those of its pipeline in diffusers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from adapterkit import seeds
from torch import Tensor

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.models.adapter import first_order

SIZE, STEPS = (32, 16), 6


def theirs(
    model: Any, x: Tensor, prompts: list[str], *, size: tuple[int, int] = SIZE, **more: Any
) -> Tensor:
    """Return the latents of diffusers' pipeline, by Euler's steps."""
    pipe, options = copy.copy(model.pipeline()), model.options
    pipe.register_modules(scheduler=first_order(pipe.scheduler))
    pipe.set_progress_bar_config(disable=True)
    both = {"guidance_scale_2": options.guidance_2} if options.guidance_2 is not None else {}
    found: Tensor = pipe(
        prompt=prompts,
        latents=x,
        num_inference_steps=STEPS,
        height=size[0],
        width=size[1],
        num_frames=options.frames,
        guidance_scale=options.guidance,
        max_sequence_length=options.max_sequence_length,
        output_type="latent",
        **both,
        **more,
    ).frames
    return found


def ours(model: Any, cond: dict[str, Tensor], count: int, size: tuple[int, int] = SIZE) -> Tensor:
    """Return what the engine samples without noise."""
    return sample_ode(
        model,
        cond,
        sigmas=model.sigmas(STEPS, *size),
        shape=model.latent_shape(*size),
        group_size=1,
        generators=seeds(count),
    )


def drawn(model: Any, count: int, size: tuple[int, int] = SIZE) -> Tensor:
    """Return the noise that the engine draws."""
    shape = (1, *model.latent_shape(*size))
    return torch.cat([torch.randn(shape, generator=key) for key in seeds(count)])
