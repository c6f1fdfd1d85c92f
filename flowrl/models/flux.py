"""FLUX.1-dev and FLUX.1-schnell as a FlowModel, over the public diffusers FluxPipeline."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.errors import ConfigError, ModelError
from flowrl.models.core import Core, load
from flowrl.models.flow_pipeline import (
    check_configs,
    check_decode_batch,
    check_size,
    decode,
    guided,
    pipeline_sigmas,
)
from flowrl.models.loading import Part
from flowrl.models.texts import check_tokens
from flowrl.models.tuning import tuning_from
from flowrl.types import Cond

GUIDANCE = 3.5  # FluxPipeline's default
PATCH = 2  # a token is a square of 2 x 2 latents
_IMAGE_INPUT = ("image_encoder", "feature_extractor")  # of IP-Adapters, which text to image does not need
_PARTS = {
    "transformer": Part(("FluxTransformer2DModel",)),
    "scheduler": Part(("FlowMatchEulerDiscreteScheduler",)),
    "vae": Part(("AutoencoderKL",)),
    "text_encoder": Part(("CLIPTextModel",)),
    "text_encoder_2": Part(("T5EncoderModel",)),
    "tokenizer": Part(("CLIPTokenizer", "CLIPTokenizerFast")),
    "tokenizer_2": Part(("T5TokenizerFast", "T5Tokenizer")),
}
_FEW_STEPS = re.compile(r"(?<![a-z])(schnell|turbo|lightning|hyper)(?![a-z])", re.IGNORECASE)


def flux(
    path: str,
    *,
    guidance: float | None = None,
    true_cfg_scale: float = 1.0,
    tune: str = "lora",
    lora: dict[str, Any] | None = None,
    layers: Sequence[str] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    negative_prompt: str = "",
    max_sequence_length: int = 512,
    decode_batch: int = 4,
    seed: int = 0,
    runtime: dict[str, Any] | None = None,
) -> Flux:
    """Load a FLUX.1 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    ``guidance`` is the number that a guidance-distilled network (dev) is told, 3.5 if None; schnell has no input for
    it. ``true_cfg_scale`` above 1 turns classifier-free guidance against ``negative_prompt`` on, which doubles the
    network's work. The other options are those of ``sd3``; ``max_sequence_length`` is 512 for dev, 256 for schnell.
    Raise ConfigError for a wrong option, ModelError for a wrong model; warn before training a step-distilled model.
    """
    _check_guidance(guidance, true_cfg_scale, negative_prompt)
    check_tokens(max_sequence_length)
    check_decode_batch(decode_batch)
    tuning = tuning_from(tune=tune, lora=lora, layers=layers, dtype=dtype, device=device, seed=seed, runtime=runtime)
    loaded = load(FluxPipeline, path, _PARTS, tuning, leave_out=_IMAGE_INPUT)
    _check_channels(loaded.pipeline, path)
    told = _embedded_guidance(loaded.pipeline, path, guidance)
    if tune != "none":
        _warn_if_step_distilled(loaded.pipeline, path)
    return Flux(
        Core(loaded, tuning, t5_tokens=max_sequence_length),
        guidance=told,
        true_cfg_scale=true_cfg_scale,
        negative_prompt=negative_prompt,
        max_sequence_length=max_sequence_length,
        decode_batch=decode_batch,
    )


class Flux:
    """A FlowModel around one FluxPipeline; see the FlowModel protocol for the contract.

    Latents are [16,h,w], not the pipeline's packed [tokens,64]. Its generator draws them in this shape, so equal seeds
    give equal noise; `pack` makes of them what it takes as ``latents``; and `decode` can tell a picture's two sides.
    Packing only reorders numbers, so no log-prob depends on it.
    """

    def __init__(
        self,
        core: Core,
        *,
        guidance: float | None,
        true_cfg_scale: float,
        negative_prompt: str,
        max_sequence_length: int,
        decode_batch: int,
    ) -> None:
        self.guidance = guidance  # None: the network has no input for it
        self.true_cfg_scale = true_cfg_scale
        self.guided = true_cfg_scale > 1
        self.dtype = core.tuning.dtype
        self.autocast = core.tuning.autocast  # float32 master weights, arithmetic in dtype
        self.negative_prompt = negative_prompt
        self.max_sequence_length = max_sequence_length
        self.decode_batch = decode_batch
        self._core = core
        self._pipeline = core.pipeline

    @property
    def transformer(self) -> Any:
        """Return the network that is trained."""
        return self._pipeline.transformer

    @property
    def device(self) -> torch.device:
        """Return where the network runs."""
        return self._core.device

    def pipeline(self) -> Any:  # diffusers does not declare its pipelines' parts as attributes
        """Return the FluxPipeline with the current weights (shared, not copied).

        After ``tune="full"`` in a short dtype, call it under ``torch.autocast``: its transformer is float32. With
        ``offload`` its text encoders and VAE are on the CPU.
        """
        return self._core.whole()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the transformer, in module order."""
        return self._core.trainable()

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of a picture of ``height`` x ``width`` pixels. Raise ModelError.

        **Differs:** the pipeline rounds a size that does not fit down, with a line in its log.
        """
        factor = self._pipeline.vae_scale_factor
        check_size(height, width, unit=PATCH * factor)
        return self.transformer.config.in_channels // PATCH**2, height // factor, width // factor

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device, ending in 0.

        The scheduler's config decides the shift: by the number of tokens with dev, none with schnell.
        """
        _, rows, columns = self.latent_shape(height, width)
        tokens = (rows // PATCH) * (columns // PATCH)
        scheduler = self._pipeline.scheduler
        even = not scheduler.config.get(
            "use_flow_sigmas", False
        )  # a leftover of other schedulers that FluxPipeline obeys
        return pipeline_sigmas(scheduler, steps, tokens=tokens, device=self.device, even=even)

    def encode(self, prompts: list[str]) -> Cond:
        """Return T5's ``embeds`` [G,T,D] and CLIP's ``pooled`` [G,P], both as ``negative_`` too under true CFG."""
        negative = self.negative_prompt if self.guided else None
        return self._core.encode(prompts, self._text, negative=negative)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B,C,h,w], of x [B,C,h,w] at sigma [B].

        **Differs:** under true CFG the pipeline calls the network twice and mixes in the transformer's dtype; here the
        halves are one batch and are mixed in float32.
        """
        if not self.guided:
            return self._network(x, sigma, cond)
        return guided(self._network, self.true_cfg_scale, x, sigma, cond)

    def decode(self, x0: Tensor) -> Tensor:
        """Return pictures [B,3,H,W], float32 in [0,1], of latents [B,C,h,w]; ``decode_batch`` at a time."""
        with self._core.vae_at_work():
            return decode(self._pipeline, x0, decode_batch=self.decode_batch)

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B], rounded where FluxPipeline rounds it: before it divides.

        Sampling and training both come here. **Differs:** Flow-GRPO's code rounds to bfloat16 before the division when
        it samples and after it when it trains, so that on many grids the network is asked about two different times.
        """
        scale = self._pipeline.scheduler.config.num_train_timesteps
        return (sigma.to(self.device, torch.float32) * scale).to(self.dtype) / 1000

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        size, rows, columns = len(x), x.shape[-2] // PATCH, x.shape[-1] // PATCH
        # The network itself turns guidance and time into its own dtype.
        guidance = None if self.guidance is None else torch.full((size,), self.guidance, device=x.device)
        named = {
            "hidden_states": pack(x).to(self.dtype),
            "timestep": self.time(sigma),
            "guidance": guidance,
            "pooled_projections": cond["pooled"].to(self.dtype),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "txt_ids": torch.zeros(cond["embeds"].shape[1], 3, device=x.device),
            "img_ids": image_ids(rows, columns, x.device),
        }
        return unpack(self._core.call(named=named), rows)

    def _text(self, prompt: str) -> dict[str, Tensor]:
        embeds, pooled, _ = self._pipeline.encode_prompt(
            [prompt], device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}


def pack(x: Tensor) -> Tensor:
    """Return the tokens [B, (h/2)(w/2), 4C] of latents [B,C,h,w]: squares of 2 x 2, row by row."""
    return pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, rows: int) -> Tensor:
    """Return the latents [B,C,2 rows,w] of tokens [B,N,4C]; the inverse of `pack`."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, -1)), PATCH)


def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the positions [rows columns, 3] of image tokens: 0, row, column.

    **Differs:** float32 always; the pipeline's bfloat16 cannot count beyond 256 (pictures of over 4096 pixels).
    """
    sides = (torch.arange(size, device=device, dtype=torch.float32) for size in (1, rows, columns))
    return torch.cartesian_prod(*sides)


def _check_guidance(guidance: float | None, true_cfg_scale: float, negative_prompt: str) -> None:
    """Raise ConfigError before gigabytes are read."""
    if guidance is not None and (not math.isfinite(guidance) or guidance < 0):
        raise ConfigError(f"guidance: expected a finite number of at least 0, or null, got {guidance!r}")
    if not math.isfinite(true_cfg_scale) or true_cfg_scale < 1:
        raise ConfigError(f"true_cfg_scale: expected a finite number of at least 1 (1 is off), got {true_cfg_scale!r}")
    if negative_prompt and true_cfg_scale == 1:
        raise ConfigError("negative_prompt: has no effect unless true_cfg_scale is above 1, got true_cfg_scale 1")


def _check_channels(pipeline: Any, path: str) -> None:
    """Raise ModelError if the transformer's tokens are not 2 x 2 latents of the VAE."""
    config = pipeline.transformer.config
    if config.patch_size != 1 or config.out_channels not in (None, config.in_channels):
        raise ModelError(
            f"{path}: transformer/config.json must have patch_size 1 and as many output as input channels, got"
            f" patch_size {config.patch_size}, in_channels {config.in_channels}, out_channels {config.out_channels}"
        )
    check_configs(pipeline, path, channels=config.in_channels // PATCH**2)


def _embedded_guidance(pipeline: Any, path: str, guidance: float | None) -> float | None:
    """Return the number to tell the network, or None if it has no input for one. Raise ConfigError."""
    if pipeline.transformer.config.guidance_embeds:
        return GUIDANCE if guidance is None else guidance
    if guidance is not None:
        raise ConfigError(
            f"guidance: {path} has no guidance embedding (FLUX.1-schnell has none), so {guidance!r} would have no"
            " effect; leave guidance out, or set true_cfg_scale above 1"
        )
    return None


def _warn_if_step_distilled(pipeline: Any, path: str) -> None:
    """Warn of models that were distilled to a few steps, known by schnell's settings or by their name."""
    plain = not pipeline.transformer.config.guidance_embeds and not pipeline.scheduler.config.use_dynamic_shifting
    if plain or _FEW_STEPS.search(Path(path).name):
        warnings.warn(
            f"{path} looks distilled to a few steps, like FLUX.1-schnell. Users of several methods report that such"
            " models blur and collapse under reinforcement learning: watch the picture grids, keep a KL penalty and a"
            " low learning rate, or train FLUX.1-dev",
            stacklevel=3,
        )
