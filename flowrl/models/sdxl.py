"""Stable Diffusion XL (base) as a FlowModel, over the public diffusers
StableDiffusionXLPipeline."""

from __future__ import annotations

from typing import Annotated

import torch
from diffusers import StableDiffusionXLPipeline
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import CLIPTextConfig

from flowrl.core.errors import ModelError
from flowrl.core.types import Cond
from flowrl.models.files.loading import CLIP_TOKENIZER, Loaded, PipelinePart
from flowrl.models.options import NEUTRAL, STRICT, options_of, pick_tuning
from flowrl.models.tuned_pipeline import TunedPipeline
from flowrl.models.tuning import UNET_ATTENTION
from flowrl.models.unet import PARTS, UNetFacts, UNetModel, UNetOptions, load_unet

XL_PARTS = PARTS | {
    "text_encoder_2": PipelinePart(("CLIPTextModelWithProjection",)),
    "tokenizer_2": PipelinePart(CLIP_TOKENIZER),
}
# height and width in pixels
Size = Annotated[
    tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]], Field(strict=False)
]
# top and left in pixels
Corner = Annotated[
    tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], Field(strict=False)
]


class SDXLFacts(UNetFacts):
    """What is known of all models that `sdxl` reads."""

    pipeline = "StableDiffusionXLPipeline"
    typical = "stabilityai/stable-diffusion-xl-base-1.0"
    # without a negative prompt the pipeline leads away from zeros
    neutral = NEUTRAL | {"negative_prompt": None}
    tiny = {"sdxl": {}}

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32 for float16, in which the VAE overflows."""
        return torch.float32 if dtype == torch.float16 else dtype


FACTS = SDXLFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SDXLOptions(UNetOptions):
    """The options of `sdxl`: those of all UNets, and what the network is given of the image's
    history, by default that it has its own size and was not cropped."""

    # None: the negative embeddings are zeros if the pipeline's config says
    # force_zeros_for_empty_prompt, else those of an empty prompt
    negative_prompt: str | None = None
    original_size: Size | None = None
    crop: Corner = (0, 0)
    target_size: Size | None = None


@options_of(SDXLOptions, FACTS)
def sdxl(options: SDXLOptions) -> SDXL:
    """Load an SDXL pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `SDXLOptions` for what can be set. The VAE decodes in float32 where float16 would overflow.
    **Differs:** the pipeline adds an invisible watermark where that library is installed; here none
    is added. Raise ConfigError for a wrong option, ModelError for a wrong model.
    """
    tuning = pick_tuning(options, UNET_ATTENTION)
    loaded = load_unet(
        StableDiffusionXLPipeline,
        options,
        XL_PARTS,
        tuning=tuning,
        addition="text_time",
        leave_out=("feature_extractor", "image_encoder"),
    )
    _check_configs(loaded, options.path)
    return SDXL(TunedPipeline(loaded, tuning, network="unet"), options)


class SDXL(UNetModel[SDXLOptions]):
    """A FlowModel around one StableDiffusionXLPipeline. Conditioning is ``embeds`` [G,T,D] and
    ``pooled`` [G,P]."""

    facts = FACTS

    upcasts = True

    @property
    def negative_prompt(self) -> str | None:
        """Return the negative prompt; None: its embeddings are zeros."""
        zeros = self._pipeline.config.force_zeros_for_empty_prompt
        if self.options.negative_prompt is None and not zeros:
            return ""
        return self.options.negative_prompt

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self._pipeline.encode_prompt(
            [prompt], device=self.text_device, do_classifier_free_guidance=False
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def _added(self, x: Tensor, cond: Cond) -> dict[str, Tensor]:
        """Return the pooled text and the time ids [B, 6]."""
        options, pooled = self.options, cond["pooled"]
        own = [side * self._pipeline.vae_scale_factor for side in x.shape[2:]]
        ids = [*(options.original_size or own), *options.crop, *(options.target_size or own)]
        # filled on the device number by number: a copy of the list would make the host wait for the
        # device
        ones = torch.ones(len(x), 1, dtype=pooled.dtype, device=pooled.device)
        columns = [number * ones for number in ids]
        return {"text_embeds": pooled, "time_ids": torch.cat(columns, 1)}


def _check_configs(loaded: Loaded, path: str) -> None:
    """Raise ModelError where the parts do not fit together, or need what flowrl does not do."""
    unet, vae = loaded.pipeline.unet, loaded.pipeline.vae.config
    # the encoder may not be loaded yet
    text = CLIPTextConfig.from_pretrained(loaded.folder / "text_encoder_2")
    made = 6 * unet.config.addition_time_embed_dim + text.projection_dim
    expected = unet.add_embedding.linear_1.in_features
    if made != expected:
        raise ModelError(
            f"{path}: the UNet expects {expected} numbers besides the text tokens, its config "
            f"makes {made}"
        )
    if vae.latents_mean is not None or vae.latents_std is not None:
        raise ModelError(
            f"{path}: vae/config.json sets latents_mean or latents_std; flowrl needs plain scaled "
            "latents"
        )
