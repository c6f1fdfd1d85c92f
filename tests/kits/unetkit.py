"""Diffusers' own DDIM sampling, as the tests of UNet adapters compare with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from diffusers import DDIMScheduler, DiffusionPipeline
from modelkit import euler
from torch import Tensor

from flowrl.core.noise_path import vp_from_flow
from flowrl.models.unet import UNetModel

PROMPTS = ["a red square", "two small blue circles left of a green triangle on white", "a cat"]


def ours(model: UNetModel[Any], x_vp: Tensor, sigmas: Tensor, prompts: list[str]) -> Tensor:
    """Sample by Euler on the flow path from the pipeline's noise; return x at the last level."""
    first = float(sigmas[0])
    return euler(model, x_vp * math.hypot(1 - first, first), sigmas, prompts)


def in_vp(x: Tensor, sigmas: Tensor) -> Tensor:
    """Return x at the grid's last level in the pipeline's coordinates."""
    return vp_from_flow(x, sigmas[-1:])


def diffusers_pipeline(model: UNetModel[Any], folder: Path, **scheduler: Any) -> Any:
    """Load the folder anew as diffusers' documentation shows for DDIM, and give it the model's
    current UNet."""
    pipeline = DiffusionPipeline.from_pretrained(folder, **without_checker(model))
    settings = {"clip_sample": False} | scheduler
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, **settings)
    pipeline.unet = model.unet
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def without_checker(model: UNetModel[Any]) -> dict[str, Any]:
    return {"safety_checker": None} if "safety_checker" in model.pipeline().components else {}


def theirs(
    pipeline: Any,
    model: UNetModel[Any],
    x_vp: Tensor,
    prompts: list[str],
    *,
    steps: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return the last latents and the images that diffusers samples from the same noise."""
    negative, seen = model.negative_prompt, [x_vp]

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
