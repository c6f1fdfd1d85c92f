"""FLUX.1-dev and FLUX.1-schnell as a FlowModel, over the public diffusers FluxPipeline."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from diffusers import FluxPipeline
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Cond
from flowrl.models.adapter import (
    SquareTokenModel,
    check_configs,
    grid_positions,
    guidance_rows,
    pack,
    unpack,
)
from flowrl.models.files.loading import CLIP_TOKENIZER, T5_TOKENIZER, PipelinePart
from flowrl.models.options import (
    PATCH,
    STRICT,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    T5Tokens,
    behind,
    guidance_input,
    options_of,
    pick_tuning,
    warn_if_distilled,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

GUIDANCE = 3.5  # FluxPipeline's default
IMAGE_INPUT = ("image_encoder", "feature_extractor")  # of IP-Adapters, unused from text to image
PARTS = {
    "transformer": PipelinePart(("FluxTransformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKL",)),
    "text_encoder": PipelinePart(("CLIPTextModel",)),
    "text_encoder_2": PipelinePart(("T5EncoderModel",)),
    "tokenizer": PipelinePart(CLIP_TOKENIZER),
    "tokenizer_2": PipelinePart(T5_TOKENIZER),
}


class FluxFacts(Facts):
    """What is known of all models that `flux` reads."""

    pipeline = "FluxPipeline"
    kind = "FluxTransformer2DModel"
    spec = "flux-1-dev"
    typical = "black-forest-labs/FLUX.1-dev"
    packed = PATCH**2
    pooled = "pooled_projection_dim"
    needs_negative = True
    tiny = {
        "flux": {},
        "flux_schnell": {},
    }

    def tiny_for(self, parts: Parts) -> str:
        """Return the name of the tiny pipeline that is most like a model."""
        told = parts["transformer"].get("guidance_embeds", True)
        return super().tiny_for(parts) if told else "flux_schnell"

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given; the tokens of a source stand behind the others."""
        rows, text = empty.rows, sizes.text
        channels, height, width = behind(sizes).latent
        tokens = (height // PATCH) * (width // PATCH)
        return {
            "hidden_states": empty(rows, tokens, PATCH**2 * channels),
            "timestep": empty(rows),
            "guidance": guidance_input(empty, parts["transformer"]),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
            "pooled_projections": empty(rows, text.pooled),
            "txt_ids": empty(text.tokens, 3, dtype=torch.float32),
            "img_ids": empty(tokens, 3, dtype=torch.float32),
        }


FACTS = FluxFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FluxOptions(PipelineOptions):
    """The options of `flux`."""

    # the number that a guidance-distilled network (dev) is given, 3.5 if None; schnell has no
    # input for it
    guidance: Guidance | None = None
    # above 1: classifier-free guidance against negative_prompt, which doubles the network's work
    true_cfg_scale: Annotated[FiniteFloat, Field(ge=1)] = 1.0
    negative_prompt: str = ""
    max_sequence_length: T5Tokens = 512  # tokens of T5: 512 for dev, 256 for schnell
    branches: ClassVar[tuple[str, float]] = ("true_cfg_scale", 1.0)


@options_of(FluxOptions, FACTS)
def flux(options: FluxOptions) -> Flux:
    """Load a FLUX.1 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `FluxOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model; warn before training a step-distilled model.
    """
    tuned = load_flux(FluxPipeline, options)
    if options.tune != "none":
        pipeline = tuned.pipeline
        config, scheduler = pipeline.transformer.config, pipeline.scheduler.config
        plain = not config.guidance_embeds and not scheduler.use_dynamic_shifting  # as schnell
        warn_if_distilled(options.path, known=plain)
    return Flux(tuned, options)


def load_flux(pipeline_class: Any, options: FluxOptions) -> TunedPipeline:
    """Load a pipeline of FLUX.1's parts, and tune its network. Raise ConfigError, ModelError."""
    path, tuning = options.path, pick_tuning(options, FACTS.targets)
    loaded = load_for_tuning(pipeline_class, path, PARTS, tuning, leave_out=IMAGE_INPUT)
    _check_channels(loaded.pipeline, path)
    embedded_guidance(loaded.pipeline, options)
    return TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length)


class Flux(SquareTokenModel[FluxOptions]):
    """A FlowModel around one FluxPipeline.

    Latents are [16,h,w], not the pipeline's packed [tokens,64]. Its generator draws them in this
    shape, so equal seeds give equal noise; `pack` makes of them what it takes as ``latents``; and
    `decode` can tell an image's two sides. Packing only reorders numbers, so no log-prob depends
    on it. The scheduler's config decides the shift of `sigmas`: by the number of tokens with dev,
    none with schnell. Conditioning is T5's ``embeds`` [G,T,D] and CLIP's ``pooled`` [G,P].
    **Differs:** under true CFG the pipeline calls the network twice; here the halves are one batch.
    """

    facts = FACTS

    reads_flow_sigmas = True

    def __init__(self, tuned: TunedPipeline, options: FluxOptions) -> None:
        super().__init__(tuned, options)
        self.guidance = embedded_guidance(tuned.pipeline, options)

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B], rounded where FluxPipeline rounds it:
        before it divides.

        Sampling and training both come here. **Differs:** Flow-GRPO's code rounds to bfloat16
        before the division when it samples and after it when it trains, so that on many grids the
        network is asked about two different times.
        """
        return self._timesteps(sigma).to(self.dtype) / 1000

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        tokens, ids = self._image(x, cond)
        # The network itself turns guidance and time into its own dtype.
        named = {
            "hidden_states": tokens.to(self.dtype),
            "timestep": self.time(sigma),
            "guidance": guidance_rows(self.guidance, x),
            "pooled_projections": cond["pooled"].to(self.dtype),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "txt_ids": torch.zeros(cond["embeds"].shape[1], 3, device=x.device),
            "img_ids": ids,
        }
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        return unpack(self._tuned.call(named=named)[:, : rows * columns], rows)

    def _image(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        """Return what the network sees of images: tokens [B,N,4C], those of x first, and their
        positions [N,3]."""
        rows, columns = x.shape[-2] // PATCH, x.shape[-1] // PATCH
        return pack(x), image_ids(rows, columns, x.device)

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        length = self.options.max_sequence_length
        embeds, pooled, _ = self._pipeline.encode_prompt(
            [prompt], device=self.text_device, max_sequence_length=length
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}


def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the positions [rows columns, 3] of image tokens: 0, row, column."""
    return grid_positions((1, rows, columns), device)


def embedded_guidance(pipeline: Any, options: FluxOptions) -> float | None:
    """Return the number to give the network, or None if it has no input for one. Raise
    ConfigError."""
    if pipeline.transformer.config.guidance_embeds:
        return GUIDANCE if options.guidance is None else options.guidance
    if options.guidance is not None:
        raise ConfigError(
            f"guidance: {options.path} has no guidance embedding (FLUX.1-schnell has none), so "
            f"{options.guidance!r} would have no effect; leave guidance out, or set "
            "true_cfg_scale above 1"
        )
    return None


def _check_channels(pipeline: Any, path: str) -> None:
    """Raise ModelError if the transformer's tokens are not 2 x 2 latents of the VAE."""
    config = pipeline.transformer.config
    if config.patch_size != 1 or config.out_channels not in (None, config.in_channels):
        raise ModelError(
            f"{path}: transformer/config.json must have patch_size 1 and as many output as input "
            f"channels, got patch_size {config.patch_size}, in_channels {config.in_channels}, "
            f"out_channels {config.out_channels}"
        )
    check_configs(pipeline, path, channels=config.in_channels // PATCH**2)
