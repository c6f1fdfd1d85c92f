"""Stable Diffusion XL (base) as a FlowModel, over the public diffusers StableDiffusionXLPipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor
from transformers import CLIPTextConfig

from flowrl.errors import ConfigError, ModelError
from flowrl.models.core import Core
from flowrl.models.loading import Loaded, Part
from flowrl.models.lora import UNET_ATTENTION
from flowrl.models.tuning import tuning_from
from flowrl.models.unet import CLIP, PARTS, Kind, Options, UNetFlow, check_options, load_unet
from flowrl.types import Cond

_PARTS = PARTS | {"text_encoder_2": Part(("CLIPTextModelWithProjection",)), "tokenizer_2": Part(CLIP)}


def sdxl(
    path: str,
    *,
    guidance: float = 1.0,
    guidance_rescale: float = 0.0,
    tune: str = "lora",
    lora: dict[str, Any] | None = None,
    layers: Sequence[str] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    negative_prompt: str | None = None,
    original_size: Sequence[int] | None = None,
    crop: Sequence[int] = (0, 0),
    target_size: Sequence[int] | None = None,
    spacing: str | None = None,
    decode_batch: int = 4,
    seed: int = 0,
    runtime: dict[str, Any] | None = None,
) -> UNetFlow:
    """Load an SDXL pipeline from a folder or a Hugging Face id, ready to sample and to train.

    As `sd15`, and: without a ``negative_prompt`` the negative embeddings are zeros if the pipeline's config says
    ``force_zeros_for_empty_prompt``, else those of an empty prompt; ``original_size``, ``crop`` (top, left) and
    ``target_size`` (height, width) are what the network is told of the picture, by default that it has its own size
    and was not cropped. The VAE decodes in float32 where float16 would overflow.
    **Differs:** the pipeline adds an invisible watermark where that library is installed; here none is added.
    Raise ConfigError for a wrong option, ModelError for a wrong model.
    """
    options = Options(guidance, guidance_rescale, negative_prompt, spacing, decode_batch)
    check_options(options)
    told = _Told(_pair(original_size, "original_size", least=1), crop, _pair(target_size, "target_size", least=1))
    _pair(crop, "crop", least=0)
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
        StableDiffusionXLPipeline,
        path,
        _PARTS,
        tuning=tuning,
        spacing=spacing,
        addition="text_time",
        leave_out=("feature_extractor", "image_encoder"),
    )
    pipeline = loaded.pipeline
    _check_configs(loaded, path)
    if negative_prompt is None and not pipeline.config.force_zeros_for_empty_prompt:
        options = options._replace(negative_prompt="")
    kind = Kind(_text, partial(_added, told, pipeline.vae_scale_factor), upcasts=True)
    return UNetFlow(Core(loaded, tuning, network="unet"), kind, options)


class _Told(NamedTuple):
    """What the network is told of a picture; None is the picture's own height and width."""

    original_size: Sequence[int] | None
    crop: Sequence[int]
    target_size: Sequence[int] | None


def _text(pipeline: Any, prompt: str, device: torch.device) -> dict[str, Tensor]:
    embeds, _, pooled, _ = pipeline.encode_prompt([prompt], device=device, do_classifier_free_guidance=False)
    return {"embeds": embeds[0], "pooled": pooled[0]}


def _added(told: _Told, factor: int, x: Tensor, cond: Cond) -> dict[str, Tensor]:
    """Return the pooled text and the time ids [B, 6] for latents x [B, C, h, w] of ``factor`` pixels each."""
    pooled, own = cond["pooled"], [side * factor for side in x.shape[2:]]
    ids = [*(told.original_size or own), *told.crop, *(told.target_size or own)]
    # filled on the device number by number: a copy of the list would make the host wait for the device
    column = [torch.full((len(x), 1), number, dtype=pooled.dtype, device=pooled.device) for number in ids]
    return {"text_embeds": pooled, "time_ids": torch.cat(column, 1)}


def _pair(value: Sequence[int] | None, name: str, *, least: int) -> Sequence[int] | None:
    """Return value if it is None or two whole numbers from ``least``. Raise ConfigError."""
    if value is None:
        return None
    whole = isinstance(value, list | tuple) and all(type(number) is int and number >= least for number in value)
    if not whole or len(value) != 2:
        raise ConfigError(f"{name}: expected two whole numbers of at least {least}, got {value!r}")
    return value


def _check_configs(loaded: Loaded, path: str) -> None:
    """Raise ModelError where the parts do not fit together, or need what flowrl does not do."""
    unet, vae = loaded.pipeline.unet, loaded.pipeline.vae.config
    text = CLIPTextConfig.from_pretrained(loaded.folder / "text_encoder_2")  # the encoder may not be loaded yet
    told = 6 * unet.config.addition_time_embed_dim + text.projection_dim
    expected = unet.add_embedding.linear_1.in_features
    if told != expected:
        raise ModelError(
            f"{path}: the UNet expects {expected} numbers besides the text tokens, its config makes {told}"
        )
    if vae.latents_mean is not None or vae.latents_std is not None:
        raise ModelError(f"{path}: vae/config.json sets latents_mean or latents_std; flowrl needs plain scaled latents")
