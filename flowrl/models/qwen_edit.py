"""Qwen-Image-Edit as a FlowModel that edits, over the public diffusers QwenImageEditPipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL.Image import Image
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.pixels import from_bytes
from flowrl.core.types import Cond, Source
from flowrl.models.adapter import pack
from flowrl.models.files.loading import PipelinePart
from flowrl.models.options import PATCH, STRICT, options_of, pick_tuning
from flowrl.models.prompt_encoding import NEGATIVE, SOURCE, Texts, stacked, to_pil
from flowrl.models.qwen_image import (
    PARTS,
    PLAIN,
    TARGETS,
    QwenImage,
    QwenImageFacts,
    QwenImageOptions,
    check_network,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning

EDIT_PARTS = PARTS | {"processor": PipelinePart(("Qwen2VLProcessor", "Qwen2_5_VLProcessor"))}
LAYERS = ("use_additional_t_cond", "use_layer3d_rope", "guidance_embeds")  # of other networks
WHOLE = 1024 * 1024  # pixels that the pipelines scale a source to
Pixels = Annotated[int, Field(ge=32 * 32)]
Tokens = Annotated[int, Field(ge=1, le=8192)]


class QwenEditFacts(QwenImageFacts):
    """What is known of all models that `qwen_edit` reads, whose pipelines cut no prompt."""

    pipeline = "QwenImageEditPipeline"
    typical = "Qwen/Qwen-Image-Edit"
    sources = "always"
    call = {
        name: argument
        for name, argument in QwenImageFacts.call.items()
        if name != "max_sequence_length"
    }
    tiny = {"qwen_edit": {}}
    seen = WHOLE  # pixels that the pipeline shows the language model

    def source_shape(
        self, latent: tuple[int, ...], given: Mapping[str, Any], size: tuple[int, int], count: int
    ) -> tuple[int, int]:
        """Return rows and columns of the source's latents, scaled to its own area."""
        factor = size[0] // latent[1]
        width, height, _ = calculate_dimensions(given["source_pixels"], size[1] / size[0])
        return height // factor, width // factor

    def source_note(self, given: Mapping[str, Any]) -> str:
        """Say where a run scaled sources otherwise than the pipeline does."""
        areas = (given["source_pixels"], given["seen_pixels"] or given["source_pixels"])
        if areas == (WHOLE, self.seen):
            return ""
        return (
            f" Then it scaled them to an area of {areas[0]} pixels for the VAE and of {areas[1]} "
            f"for the language model. The pipeline scales to {WHOLE} and {self.seen}, so its "
            "images differ."
        )


FACTS = QwenEditFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QwenEditOptions(QwenImageOptions):
    """The options of `qwen_edit`."""

    # pixels that a source is scaled to for the VAE; the pipeline's area by default. Fewer cost less
    source_pixels: Pixels = WHOLE
    # the same for the language model; None: as many, as the pipeline has it
    seen_pixels: Pixels | None = None
    # tokens of a prompt with its source, one for each 28 x 28 pixels
    max_sequence_length: Tokens = 2048


@options_of(QwenEditOptions, FACTS)
def qwen_edit(options: QwenEditOptions) -> QwenEdit:
    """Load a Qwen-Image-Edit pipeline from a folder or a Hugging Face id, ready to sample and to
    train.

    See `QwenEditOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for
    a wrong model; Qwen-Image-Edit-2509 and later are `qwen_edit_plus`.
    """
    return QwenEdit(load_qwen_edit(QwenImageEditPipeline, options), options)


def load_qwen_edit(pipeline_class: Any, options: QwenEditOptions) -> TunedPipeline:
    """Load a pipeline of Qwen-Image-Edit's parts, and tune its network. Raise ConfigError,
    ModelError."""
    if options.how.cache is not None:
        raise ConfigError(
            "runtime.cache: what the text encoder makes of a prompt depends on its source here, "
            "and is not kept in a folder; leave cache out"
        )
    tuning, path = pick_tuning(options, TARGETS), options.path
    loaded = load_for_tuning(pipeline_class, path, EDIT_PARTS, tuning)
    # other networks of the family have the same class; these settings tell them apart
    config = loaded.pipeline.transformer.config
    other = [name for name in LAYERS if config.get(name, PLAIN[name]) != PLAIN[name]]
    if other:
        raise ModelError(
            f"{path}: transformer/config.json sets {', '.join(other)}, so this is no "
            "Qwen-Image-Edit; give the path of one"
        )
    check_network(loaded.pipeline, path)
    return TunedPipeline(loaded, tuning)


class QwenEdit(QwenImage):
    """A FlowModel around one QwenImageEditPipeline: `QwenImage`, which also sees a source.

    The language model reads the prompt with the source in front of it, scaled to
    ``seen_pixels``; so does the negative prompt. The mode of the VAE's posterior of the source,
    scaled to ``source_pixels``, stands packed behind the noisy tokens, ``source`` [G,n,16,h,w]. It
    is conditioning: no noise is put on it, and the shift of `sigmas` does not count it. The norm
    that guidance keeps is of the image's tokens alone.

    **Differs:** the pipeline scales a source's own file; here it has the size of the images that
    are made before it is scaled. The pipeline gives all of its prompts one source; here each prompt
    has its own.
    """

    facts: ClassVar[QwenEditFacts] = FACTS

    options: QwenEditOptions
    most_sources = 1

    def __init__(self, tuned: TunedPipeline, options: QwenEditOptions) -> None:
        super().__init__(tuned, options)
        self._read = Texts(tuned.encoders_at_work)

    @property
    def seen_pixels(self) -> int:
        """Return the area that the language model sees a source at."""
        return self.options.seen_pixels or self.options.source_pixels

    @property
    def unlike_pipeline(self) -> str | None:
        """Say by which options a source is not scaled as the pipeline scales it; None: by none."""
        seen = self.facts.seen
        if (self.options.source_pixels, self.seen_pixels) == (WHOLE, seen):
            return None
        return f"the pipeline scales sources to {WHOLE} and {seen} pixels; so do the defaults"

    def encode(self, prompts: list[str]) -> Cond:
        """Raise DataError: an edit starts from an image."""
        raise DataError(
            f"encode: {self.options.path} edits images, but no prompt has a source; name one in "
            "each record, or take Qwen-Image with fn qwen_image"
        )

    def encode_ahead(self, prompts: Sequence[str]) -> None:
        """Do nothing: what a prompt becomes depends on its source."""

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Return ``embeds`` [G,T,D] and ``mask`` [G,T] of prompts with their sources, and the
        sources' latents. Raise DataError for another number of them, or for more tokens than
        ``max_sequence_length``."""
        images = stacked(prompts, sources, self.most_sources)
        cond = self._texts(prompts, sources)
        latents = self._source_latents(images)
        cond[SOURCE] = latents
        if self.guided:
            avoided = self.negative_prompt or ""
            negative = self._texts([avoided] * len(prompts), sources) | {SOURCE: latents}
            cond |= {NEGATIVE + name: rows for name, rows in negative.items()}
        return cond

    def _texts(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Read prompts [G] with their sources [G]; what was read is known by both."""
        keys = []
        for prompt, source in zip(prompts, sources, strict=True):
            keys.append(prompt + "".join(map(_digest, source)))
        asked = dict(zip(keys, zip(prompts, sources, strict=True), strict=True))
        return self._read.cond(keys, lambda key: self._read_one(*asked[key]), device=self.device)

    def _read_one(self, prompt: str, source: Source) -> dict[str, Tensor]:
        seen = [self._scaled(image, self.seen_pixels) for image in to_pil(source)]
        embeds, _ = self._pipeline.encode_prompt(
            prompt=[prompt], image=self._shown(seen), device=self.text_device
        )
        most = self.options.max_sequence_length
        if embeds.shape[1] > most:
            raise DataError(
                f"encode: {prompt!r} with its source has {embeds.shape[1]} tokens, and "
                f"model.max_sequence_length is {most}; raise it, or lower model.seen_pixels"
            )
        return self._filled(embeds[0])

    def _shown(self, seen: list[Image]) -> Any:
        """Return sources as the pipeline shows them to the language model."""
        return seen[0]

    def _source_latents(self, images: Tensor) -> Tensor:
        """Return the latents [G,n,16,h,w] of sources [G,n,3,H,W]."""
        area = self.options.source_pixels
        scaled = []
        for image in to_pil(tuple(images.flatten(0, 1))):
            scaled.append(from_bytes(pil_to_tensor(self._scaled(image, area))))
        return self.latents(torch.stack(scaled)).unflatten(0, images.shape[:2])

    def _scaled(self, image: Image, area: int) -> Image:
        """Scale an image to an area, its sides to multiples of 32, as the pipeline does."""
        width, height, *_ = calculate_dimensions(area, image.width / image.height)
        scaled: Image = self._pipeline.image_processor.resize(image, height, width)
        return scaled

    def _behind(self, cond: Cond) -> tuple[list[Tensor], list[tuple[int, int, int]]]:
        sources = cond[SOURCE].unbind(1)
        shapes = [(1, one.shape[-2] // PATCH, one.shape[-1] // PATCH) for one in sources]
        return [pack(one) for one in sources], shapes


def _digest(image: Tensor) -> str:
    """Return a text that only this image [3,H,W] has."""
    pixels = image.detach().cpu().contiguous().numpy()
    return f" {tuple(image.shape)} {hashlib.sha256(pixels.tobytes()).hexdigest()}"
