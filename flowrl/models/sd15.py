"""Stable Diffusion 1.x and 2.x as a FlowModel, over the public diffusers
StableDiffusionPipeline."""

from __future__ import annotations

from diffusers import StableDiffusionPipeline
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.types import Cond
from flowrl.models.options import STRICT, DecodeBatch, options_of, pick_tuning
from flowrl.models.tuned_pipeline import TunedPipeline
from flowrl.models.tuning import UNET_ATTENTION
from flowrl.models.unet import PARTS, UNetFacts, UNetModel, UNetOptions, load_unet


class SD15Facts(UNetFacts):
    """What is known of all models that `sd15` reads."""

    pipeline = "StableDiffusionPipeline"
    typical = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    tiny = {"sd15": {}}


FACTS = SD15Facts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SD15Options(UNetOptions):
    """The options of `sd15`."""

    negative_prompt: str = ""
    decode_batch: DecodeBatch = 16


@options_of(SD15Options, FACTS)
def sd15(options: SD15Options) -> SD15:
    """Load a Stable Diffusion 1.x or 2.x pipeline from a folder or a Hugging Face id, ready to
    sample and to train.

    See `UNetOptions` for what can be set. Whatever its scheduler, the pipeline is sampled by DDIM.
    **Differs:** the pipeline blacks out images by its safety checker; here it is not loaded. Raise
    ConfigError for a wrong option, ModelError for a wrong model.
    """
    tuning = pick_tuning(options, UNET_ATTENTION)
    loaded = load_unet(
        StableDiffusionPipeline,
        options,
        PARTS,
        tuning=tuning,
        addition=None,
        leave_out=("safety_checker", "feature_extractor", "image_encoder"),
    )
    return SD15(TunedPipeline(loaded, tuning, network="unet"), options)


class SD15(UNetModel[SD15Options]):
    """A FlowModel around one StableDiffusionPipeline. Conditioning is ``embeds`` [G,T,D]."""

    facts = FACTS

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _ = self._pipeline.encode_prompt([prompt], self.text_device, 1, False)
        return {"embeds": embeds[0]}

    def _added(self, x: Tensor, cond: Cond) -> dict[str, Tensor] | None:
        return None
