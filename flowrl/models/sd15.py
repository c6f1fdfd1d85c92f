"""Stable Diffusion 1.x and 2.x as a FlowModel, over the public diffusers StableDiffusionPipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from flowrl.models.core import Core
from flowrl.models.lora import UNET_ATTENTION
from flowrl.models.tuning import tuning_from
from flowrl.models.unet import PARTS, Kind, Options, UNetFlow, check_options, load_unet
from flowrl.types import Cond


def sd15(
    path: str,
    *,
    guidance: float = 1.0,
    guidance_rescale: float = 0.0,
    tune: str = "lora",
    lora: dict[str, Any] | None = None,
    layers: Sequence[str] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    negative_prompt: str = "",
    spacing: str | None = None,
    decode_batch: int = 16,
    seed: int = 0,
    runtime: dict[str, Any] | None = None,
) -> UNetFlow:
    """Load a Stable Diffusion 1.x or 2.x pipeline from a folder or a Hugging Face id, ready to sample and to train.

    ``guidance`` above 1 turns classifier-free guidance on, as in the pipeline; ``guidance_rescale`` is the pipeline's;
    ``tune`` is ``lora`` (options in ``lora``, see models/lora.py), ``full`` (all weights, or those of the linear
    ``layers`` that are named by the rule of ``lora.targets``) or ``none``; ``dtype`` is that of the frozen weights and
    the arithmetic, trained weights are float32 always; ``spacing`` of the timesteps overrides the scheduler's; ``seed``
    draws the LoRA; ``runtime`` says how the network runs (see models/runtime.py). Whatever its scheduler, the pipeline
    is sampled by DDIM.
    **Differs:** the pipeline blacks out pictures by its safety checker; here it is not loaded.
    Raise ConfigError for a wrong option, ModelError for a wrong model.
    """
    options = Options(guidance, guidance_rescale, negative_prompt, spacing, decode_batch)
    check_options(options)
    tuning = tuning_from(
        tune=tune,
        lora=lora,
        layers=layers,
        dtype=dtype,
        device=device,
        seed=seed,
        runtime=runtime,
        targets=UNET_ATTENTION,
    )
    loaded = load_unet(
        StableDiffusionPipeline,
        path,
        PARTS,
        tuning=tuning,
        spacing=spacing,
        addition=None,
        leave_out=("safety_checker", "feature_extractor", "image_encoder"),
    )
    kind = Kind(_text, _added, upcasts=False)
    return UNetFlow(Core(loaded, tuning, network="unet"), kind, options)


def _text(pipeline: Any, prompt: str, device: torch.device) -> dict[str, Tensor]:
    embeds, _ = pipeline.encode_prompt([prompt], device, 1, False)
    return {"embeds": embeds[0]}


def _added(x: Tensor, cond: Cond) -> dict[str, Tensor] | None:
    return None
