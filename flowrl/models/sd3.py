"""Stable Diffusion 3 and 3.5 as a FlowModel, over the public diffusers StableDiffusion3Pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from flowrl.errors import ModelError
from flowrl.models.core import Core, load
from flowrl.models.flow_pipeline import (
    check_configs,
    check_decode_batch,
    check_guidance,
    check_size,
    decode,
    guided,
    pipeline_sigmas,
)
from flowrl.models.loading import Part
from flowrl.models.texts import check_tokens
from flowrl.models.tuning import tuning_from
from flowrl.types import Cond

_CLIP = ("CLIPTokenizer", "CLIPTokenizerFast")
_PARTS = {
    "transformer": Part(("SD3Transformer2DModel",)),
    "scheduler": Part(("FlowMatchEulerDiscreteScheduler",)),
    "vae": Part(("AutoencoderKL",)),
    "text_encoder": Part(("CLIPTextModelWithProjection",)),
    "text_encoder_2": Part(("CLIPTextModelWithProjection",)),
    "text_encoder_3": Part(("T5EncoderModel",), optional=True),
    "tokenizer": Part(_CLIP),
    "tokenizer_2": Part(_CLIP),
    "tokenizer_3": Part(("T5TokenizerFast", "T5Tokenizer"), optional=True),
}


def sd3(
    path: str,
    *,
    guidance: float = 1.0,
    tune: str = "lora",
    lora: dict[str, Any] | None = None,
    layers: Sequence[str] | None = None,
    dtype: str = "float32",
    device: str = "auto",
    negative_prompt: str = "",
    t5: bool = True,
    max_sequence_length: int = 256,
    decode_batch: int = 64,
    seed: int = 0,
    runtime: dict[str, Any] | None = None,
) -> SD3:
    """Load an SD3 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    ``guidance`` above 1 turns classifier-free guidance on, as in the pipeline; ``tune`` is ``lora`` (options in
    ``lora``, see models/lora.py), ``full`` (all weights, or those of the linear ``layers`` that are named by the rule
    of ``lora.targets``) or ``none``; ``dtype`` is that of the frozen weights and the arithmetic (``auto``: bfloat16
    where the device multiplies in it), trained weights are float32 always; ``t5`` off leaves the T5 encoder out (zero
    tokens stand in its place, and about 10 GB are saved with SD3.5); ``max_sequence_length`` is the number of T5
    tokens; ``seed`` draws the LoRA; ``runtime`` says how the network runs (see models/runtime.py).
    **Differs:** there is no skip-layer guidance, which the pipeline offers for SD3.5 Medium.
    Raise ConfigError for a wrong option, ModelError for a wrong model.
    """
    check_guidance(guidance, negative_prompt)
    check_tokens(max_sequence_length)
    check_decode_batch(decode_batch)
    tuning = tuning_from(tune=tune, lora=lora, layers=layers, dtype=dtype, device=device, seed=seed, runtime=runtime)
    leave_out = () if t5 else ("text_encoder_3", "tokenizer_3")
    loaded = load(StableDiffusion3Pipeline, path, _PARTS, tuning, leave_out=leave_out)
    check_configs(loaded.pipeline, path, channels=loaded.pipeline.transformer.config.in_channels)
    return SD3(
        Core(loaded, tuning, t5_tokens=max_sequence_length),
        guidance=guidance,
        negative_prompt=negative_prompt,
        max_sequence_length=max_sequence_length,
        decode_batch=decode_batch,
    )


class SD3:
    """A FlowModel around one StableDiffusion3Pipeline; see the FlowModel protocol for the contract."""

    def __init__(
        self,
        core: Core,
        *,
        guidance: float,
        negative_prompt: str,
        max_sequence_length: int,
        decode_batch: int,
    ) -> None:
        self.guidance = guidance
        self.guided = guidance > 1  # StableDiffusion3Pipeline.do_classifier_free_guidance
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
        """Return the StableDiffusion3Pipeline with the current weights (shared, not copied).

        After ``tune="full"`` in a short dtype, call it under ``torch.autocast``: its transformer is float32. With
        ``offload`` its text encoders and VAE are on the CPU.
        """
        return self._core.whole()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the transformer, in module order."""
        return self._core.trainable()

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of a picture of ``height`` x ``width`` pixels. Raise ModelError."""
        config = self.transformer.config
        factor = self._pipeline.vae_scale_factor
        unit = factor * config.patch_size
        check_size(height, width, unit=unit)
        most = config.pos_embed_max_size
        if most and max(height, width) > most * unit:
            raise ModelError(f"height and width may be at most {most * unit} pixels here, got {height} x {width}")
        return int(config.in_channels), height // factor, width // factor

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device, ending in 0.

        With ``shift`` s the scheduler shifts twice at the low end: it spreads the steps over a table that is already
        shifted, then shifts them again. A resolution-dependent shift is applied if the scheduler's config asks for it.
        """
        _, rows, columns = self.latent_shape(height, width)
        patch = self.transformer.config.patch_size
        tokens = (rows // patch) * (columns // patch)
        return pipeline_sigmas(self._pipeline.scheduler, steps, tokens=tokens, device=self.device)

    def encode(self, prompts: list[str]) -> Cond:
        """Return ``embeds`` [G,T,D] and ``pooled`` [G,P], and both as ``negative_`` under guidance, on the device.

        Without a T5 encoder the pipeline still appends ``max_sequence_length`` zero tokens to CLIP's 77.
        """
        negative = self.negative_prompt if self.guided else None
        return self._core.encode(prompts, self._text, negative=negative)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity u + guidance (c - u), float32 [B,C,h,w], of x [B,C,h,w] at sigma [B].

        The unconditional and the conditional half run as one batch, in the pipeline's order, and both are trained.
        **Differs:** the halves are mixed in float32; the pipeline mixes them in the transformer's dtype.
        """
        if not self.guided:
            return self._network(x, sigma, cond)
        return guided(self._network, self.guidance, x, sigma, cond)

    def decode(self, x0: Tensor) -> Tensor:
        """Return pictures [B,3,H,W], float32 in [0,1], of latents [B,C,h,w]; ``decode_batch`` at a time."""
        with self._core.vae_at_work():
            return decode(self._pipeline, x0, decode_batch=self.decode_batch)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        # The scheduler computes its timesteps by this product in float32; in another dtype the network would see
        # another time than in the pipeline.
        time = sigma.to(x.device, torch.float32) * self._pipeline.scheduler.config.num_train_timesteps
        named = {
            "hidden_states": x.to(self.dtype),
            "timestep": time,
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "pooled_projections": cond["pooled"].to(self.dtype),
        }
        return self._core.call(named=named)

    def _text(self, prompt: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self._pipeline.encode_prompt(
            [prompt],
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}
