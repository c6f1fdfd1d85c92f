"""Diffusers' own DDIM sampling, as the tests of UNet adapters compare with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from modelkit import euler
from torch import Tensor

from flowrl.flow import vp_from_flow
from flowrl.models.unet import UNetFlow

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]


def ours(model: UNetFlow, x_vp: Tensor, sigmas: Tensor, prompts: list[str]) -> Tensor:
    """Sample by Euler on the flow path from the pipeline's noise; return x at the last level."""
    first = float(sigmas[0])
    return euler(model, x_vp * math.hypot(1 - first, first), sigmas, prompts)


def in_vp(x: Tensor, sigmas: Tensor) -> Tensor:
    """Return x at the grid's last level in the pipeline's coordinates."""
    return vp_from_flow(x, sigmas[-1:])


def diffusers_pipeline(model: UNetFlow, folder: Path, **scheduler: Any) -> Any:
    """Load the folder anew as diffusers' documentation shows for DDIM, and give it the model's current UNet."""
    pipeline = DiffusionPipeline.from_pretrained(folder, **without_checker(model))
    settings = {"clip_sample": False} | scheduler
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, **settings)
    pipeline.unet = model.unet
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def without_checker(model: UNetFlow) -> dict[str, Any]:
    return {"safety_checker": None} if "safety_checker" in model.pipeline().components else {}


def theirs(
    pipeline: Any, model: UNetFlow, x_vp: Tensor, prompts: list[str], *, steps: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the last latents and the pictures that diffusers samples from the same noise."""
    negative, seen = model.options.negative_prompt, [x_vp]

    def keep(_pipeline: Any, _step: int, _time: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(state["latents"])
        return state

    images = pipeline(
        prompts,
        negative_prompt=None if negative is None else [negative] * len(prompts),
        height=x_vp.shape[2] * 8,
        width=x_vp.shape[3] * 8,
        num_inference_steps=steps,
        guidance_scale=model.options.guidance,
        guidance_rescale=model.options.guidance_rescale,
        latents=x_vp,
        output_type="pt",
        callback_on_step_end=keep,
        **options,
    ).images
    return seen[-1], images


def check_equal(model: UNetFlow, pipeline: Any, x_vp: Tensor, steps: int, *, scale: bool, **options: Any) -> None:
    """Compare latents and pictures to 1e-5; with ``scale``, latents to 1e-5 of their std.

    Random weights take no noise away, so that under epsilon prediction DDIM's x0 = (x - s eps) / alpha grows latents
    to about 1 / alpha, 14 times a trained network's: their own rounding in float32 is 1e-6 per step.
    """
    prompts, size = PROMPTS[: len(x_vp)], (x_vp.shape[2] * 8, x_vp.shape[3] * 8)
    sigmas = model.sigmas(steps, *size)
    x = ours(model, x_vp, sigmas, prompts)
    latents, expected = theirs(pipeline, model, x_vp, prompts, steps=steps, **options)
    unit = max(1.0, float(latents.std())) if scale else 1.0
    torch.testing.assert_close(in_vp(x, sigmas), latents, rtol=0, atol=1e-5 * unit)
    images = model.decode(x)
    assert images.shape == (len(x_vp), 3, *size) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.01
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
