"""Stable Diffusion 3 and 3.5 as a FlowModel, over the public diffusers StableDiffusion3Pipeline."""

from __future__ import annotations

from diffusers import StableDiffusion3Pipeline
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.types import Cond
from flowrl.models.adapter import check_size
from flowrl.models.flow_matching import FlowMatchingModel, check_configs
from flowrl.models.loading import CLIP_TOKENIZER, T5_TOKENIZER, PipelinePart
from flowrl.models.lora import JOINT_ATTENTION
from flowrl.models.options import (
    STRICT,
    DecodeBatch,
    Guidance,
    PipelineOptions,
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

    @property
    def cfg_scale(self) -> float:
        """Return the scale of classifier-free guidance."""
        return self.guidance


@options_of(SD3Options)
def sd3(options: SD3Options) -> SD3:
    """Load an SD3 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `SD3Options` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model.
    """
    tuning = pick_tuning(options, JOINT_ATTENTION)
    leave_out = () if options.t5 else ("text_encoder_3", "tokenizer_3")
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

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of an image of ``height`` x ``width`` pixels. Raise
        ModelError."""
        config = self.network.config
        factor = self._pipeline.vae_scale_factor
        unit = factor * config.patch_size
        check_size(height, width, unit=unit, most=config.pos_embed_max_size)
        return int(config.in_channels), height // factor, width // factor

    def _token_side(self) -> int:
        return int(self.network.config.patch_size)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        # The scheduler computes its timesteps by this product in float32; in another dtype the
        # network would see another time than in the pipeline.
        scale = self._pipeline.scheduler.config.num_train_timesteps
        named = {
            "hidden_states": x.to(self.dtype),
            "timestep": sigma.to(x.device).float() * scale,
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
