"""FLUX.2 klein as a FlowModel, over the public diffusers Flux2KleinPipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers import Flux2KleinPipeline
from pydantic.dataclasses import dataclass

from flowrl.core.errors import ConfigError
from flowrl.models.files.loading import QWEN_TOKENIZER, PipelinePart
from flowrl.models.flux2 import (
    NETWORK_PARTS,
    TARGETS,
    Flux2Facts,
    Flux2Network,
    Tokens,
    check_tokens,
)
from flowrl.models.options import (
    CALL,
    STRICT,
    Guidance,
    PipelineOptions,
    options_of,
    pick_tuning,
    warn_if_distilled,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

HEAD = 3  # tokens of the chat template before the prompt
PARTS = NETWORK_PARTS | {
    "text_encoder": PipelinePart(("Qwen3ForCausalLM",)),
    "tokenizer": PipelinePart(QWEN_TOKENIZER),
}


class KleinFacts(Flux2Facts):
    """What is known of all models that `flux2_klein` reads."""

    pipeline = "Flux2KleinPipeline"
    typical = "black-forest-labs/FLUX.2-klein-base-4B"
    call = {name: argument for name, argument in CALL.items() if name != "negative_prompt"}
    negative_by_embeds = True
    tiny = {
        "flux2_klein": {},
        "flux2_klein_distilled": {},
    }


FACTS = KleinFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Flux2KleinOptions(PipelineOptions):
    """The options of `flux2_klein`."""

    # above 1: guidance, which doubles the network's work; the pipeline's default is 4. Distilled
    # models have none
    guidance: Guidance = 1.0
    # the pipeline knows no other than the empty one
    negative_prompt: str = ""
    max_sequence_length: Tokens = 512


@options_of(Flux2KleinOptions, FACTS)
def flux2_klein(options: Flux2KleinOptions) -> Flux2Klein:
    """Load a FLUX.2 klein pipeline from a folder or a Hugging Face id, ready to sample and to
    train.

    See `Flux2KleinOptions` for what can be set. Raise ConfigError for a wrong option, such as
    guidance of a distilled model, ModelError for a wrong model; warn before training a distilled
    one.
    """
    tuning = pick_tuning(options, TARGETS)
    loaded = load_for_tuning(Flux2KleinPipeline, options.path, PARTS, tuning)
    check_tokens(loaded.pipeline, options.path)
    distilled = bool(loaded.pipeline.config.is_distilled)
    if distilled and options.guided:
        raise _no_guidance(options.path, options.guidance)
    if options.tune != "none":
        warn_if_distilled(options.path, known=distilled)
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length - HEAD)
    return Flux2Klein(tuned, options)


class Flux2Klein(Flux2Network[Flux2KleinOptions]):
    """A FlowModel around one Flux2KleinPipeline. **Differs:** guidance may lead away from any
    negative prompt; the pipeline knows the empty one only."""

    facts = FACTS

    @contextmanager
    def guiding(self, scale: float, *, off: bool = False) -> Iterator[None]:
        """Let it have another guidance for a while. Raises ConfigError for a distilled model."""
        if self._pipeline.config.is_distilled and not (off and scale == 1):
            raise _no_guidance(self.options.path, scale)
        with super().guiding(scale, off=off):
            yield


def _no_guidance(path: str, scale: float) -> ConfigError:
    return ConfigError(
        f"guidance: {path} is distilled, and its pipeline ignores guidance; set it to 1, got "
        f"{scale!r}, or take the base model"
    )
