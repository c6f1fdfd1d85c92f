"""An adapter for AuraFlow, as a user would write one outside of flowrl: one file that states all
that flowrl asks about it."""

from __future__ import annotations

from typing import Any

from diffusers import AuraFlowPipeline
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.types import Cond
from flowrl.models.adapter import FlowMatchingModel, check_scheduler
from flowrl.models.files.loading import T5_TOKENIZER, PipelinePart
from flowrl.models.options import (
    STRICT,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    options_of,
    pick_tuning,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

PARTS = {
    "transformer": PipelinePart(("AuraFlowTransformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKL",)),
    "text_encoder": PipelinePart(("UMT5EncoderModel",)),
    "tokenizer": PipelinePart(T5_TOKENIZER),
}


class AuraFacts(Facts):
    """What is known of all models that `aura` reads."""

    pipeline = "AuraFlowPipeline"
    kind = "AuraFlowTransformer2DModel"
    spec = "auraflow"
    targets = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
    tiny = {"aura": {"like": "AuraFlowPipeline"}}

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given."""
        return {
            "hidden_states": empty(empty.rows, *sizes.latent),
            "encoder_hidden_states": empty(empty.rows, sizes.text.tokens, sizes.text.width),
            "timestep": empty(empty.rows),
        }


FACTS = AuraFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AuraOptions(PipelineOptions):
    """The options of `aura`."""

    guidance: Guidance = 1.0
    max_sequence_length: int = 256


@options_of(AuraOptions, FACTS)
def aura(options: AuraOptions) -> Aura:
    """Load an AuraFlow pipeline from a folder or a Hugging Face id."""
    tuning = pick_tuning(options, FACTS.targets)
    loaded = load_for_tuning(AuraFlowPipeline, options.path, PARTS, tuning)
    check_scheduler(loaded.pipeline, options.path)
    return Aura(TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length), options)


class Aura(FlowMatchingModel[AuraOptions]):
    """A FlowModel around one AuraFlowPipeline."""

    facts = FACTS

    def _token_side(self) -> int:
        return int(self.network.config.patch_size)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        named = {
            "hidden_states": x.to(self.dtype),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "timestep": (self._timesteps(sigma) / 1000).to(self.dtype),
        }
        return self._tuned.call(named=named)

    def _decode(self, x0: Tensor) -> Tensor:
        vae = self._pipeline.vae
        return self._images(x0.to(vae.device, vae.dtype) / vae.config.scaling_factor)

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, *_ = self._pipeline.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            device=self.text_device,
            max_sequence_length=self.options.max_sequence_length,
        )
        return {"embeds": embeds[0]}
