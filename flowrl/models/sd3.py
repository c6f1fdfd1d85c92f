"""Stable Diffusion 3 and 3.5 as a FlowModel, over the public diffusers StableDiffusion3Pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.types import Cond
from flowrl.models.adapter import FlowMatchingModel, check_configs
from flowrl.models.files.loading import CLIP_TOKENIZER, T5_TOKENIZER, PipelinePart
from flowrl.models.options import (
    PATCH,
    STRICT,
    DecodeBatch,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    T5Tokens,
    options_of,
    pick_tuning,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

PARTS = {
    "transformer": PipelinePart(("SD3Transformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKL",)),
    "text_encoder": PipelinePart(("CLIPTextModelWithProjection",)),
    "text_encoder_2": PipelinePart(("CLIPTextModelWithProjection",)),
    "text_encoder_3": PipelinePart(("T5EncoderModel",), optional=True),
    "tokenizer": PipelinePart(CLIP_TOKENIZER),
    "tokenizer_2": PipelinePart(CLIP_TOKENIZER),
    "tokenizer_3": PipelinePart(T5_TOKENIZER, optional=True),
}


class SD3Facts(Facts):
    """What is known of all models that `sd3` reads."""

    pipeline = "StableDiffusion3Pipeline"
    kind = "SD3Transformer2DModel"
    spec = "stable-diffusion-3"
    typical = "stabilityai/stable-diffusion-3-medium-diffusers"
    table = "pos_embed_max_size"
    pooled = "pooled_projection_dim"
    more_tokens = 77  # of CLIP
    lighter = {"t5": False}
    reads_kohya = False
    tiny = {
        "sd3": {},
        "sd3.5": {},
    }

    def left_out(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Return T5's parts where the options leave it out."""
        return () if given.get("t5", True) else ("text_encoder_3", "tokenizer_3")

    def tiny_for(self, parts: Parts) -> str:
        """Return the name of the tiny pipeline that is most like a model."""
        return "sd3.5" if parts["transformer"].get("dual_attention_layers") else "sd3"

    def unit(self, factor: int, settings: Mapping[str, Any]) -> int:
        """Return the pixels that a side is a multiple of."""
        return factor * int(settings.get("patch_size", PATCH))

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given."""
        rows, text = empty.rows, sizes.text
        return {
            "hidden_states": empty(rows, *sizes.latent),
            "timestep": empty(rows, dtype=torch.float32),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
            "pooled_projections": empty(rows, text.pooled),
        }


FACTS = SD3Facts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SD3Options(PipelineOptions):
    """The options of `sd3`; **Differs:** there is no skip-layer guidance, which the pipeline offers
    for SD3.5 Medium."""

    guidance: Guidance = 1.0  # above 1: classifier-free guidance, as in the pipeline
    negative_prompt: str = ""
    # off: zero tokens stand in the place of T5's, and about 10 GB are saved with SD3.5
    t5: bool = True
    max_sequence_length: T5Tokens = 256
    decode_batch: DecodeBatch = 64


@options_of(SD3Options, FACTS)
def sd3(options: SD3Options) -> SD3:
    """Load an SD3 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `SD3Options` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model.
    """
    tuning = pick_tuning(options, FACTS.targets)
    leave_out = FACTS.left_out({"t5": options.t5})
    loaded = load_for_tuning(
        StableDiffusion3Pipeline, options.path, PARTS, tuning, leave_out=leave_out
    )
    channels = loaded.pipeline.transformer.config.in_channels
    check_configs(loaded.pipeline, options.path, channels=channels)
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length)
    return SD3(tuned, options)


class SD3(FlowMatchingModel[SD3Options]):
    """A FlowModel around one StableDiffusion3Pipeline.

    With a ``shift`` its scheduler shifts twice at the low end of `sigmas`: it spreads the steps
    over a table that is already shifted, then shifts them again. Conditioning is ``embeds`` [G,T,D]
    and ``pooled`` [G,P]; without a T5 encoder the pipeline still appends ``max_sequence_length``
    zero tokens to CLIP's 77.
    """

    facts = FACTS

    def _token_side(self) -> int:
        return int(self.network.config.patch_size)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        named = {
            "hidden_states": x.to(self.dtype),
            "timestep": self._timesteps(sigma),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "pooled_projections": cond["pooled"].to(self.dtype),
        }
        return self._tuned.call(named=named)

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self._pipeline.encode_prompt(
            [prompt],
            None,
            None,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}
