"""FLUX.1-Kontext as a FlowModel that edits, over the public diffusers FluxKontextPipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import FluxKontextPipeline
from torch import Tensor

from flowrl.core.types import Cond, Source
from flowrl.models.adapter import pack
from flowrl.models.flux import Flux, FluxFacts, FluxOptions, image_ids, load_flux
from flowrl.models.options import PATCH, check_size, options_of
from flowrl.models.prompt_encoding import NEGATIVE, SOURCE, stacked


class KontextFacts(FluxFacts):
    """What is known of all models that `flux_kontext` reads."""

    pipeline = "FluxKontextPipeline"
    typical = "black-forest-labs/FLUX.1-Kontext-dev"
    sources = "always"
    tiny = {"flux_kontext": {}}

    def source_shape(
        self, latent: tuple[int, ...], given: Mapping[str, Any], size: tuple[int, int], count: int
    ) -> tuple[int, int]:
        """Return rows and columns of the source's latents: as large as the image."""
        return latent[1], latent[2]

    def arguments(self, given: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
        """Return what the pipeline is called with: sizes as they are."""
        own = {"max_area": height * width, "_auto_resize": False}
        return own | super().arguments(given, height, width)


FACTS = KontextFacts()


@options_of(FluxOptions, FACTS)
def flux_kontext(options: FluxOptions) -> FluxKontext:
    """Load a FLUX.1-Kontext pipeline from a folder or a Hugging Face id, ready to sample and to
    train.

    See `FluxOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model.
    """
    return FluxKontext(load_flux(FluxKontextPipeline, options), options)


class FluxKontext(Flux):
    """A FlowModel around one FluxKontextPipeline: `Flux`, whose network also sees the source.

    The source's latents, the mode of the VAE's posterior, stand packed behind the noisy ones, with
    1 in place of 0 as the first of their three positions; what the network says of them is cut off.
    They are conditioning, ``source`` [G,16,h,w]: no noise is put on them, and the shift of `sigmas`
    does not count them. Both branches of true CFG see them.

    **Differs:** the pipeline scales an output to an area of 1024 x 1024, and a source to one of 17
    preferred sizes of about that area. Here both have the size that was asked for, as the pipeline
    has them with ``max_area=height * width`` and ``_auto_resize=False``.
    """

    facts = FACTS

    most_sources = 1
    reads_flow_sigmas = False

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Return what `encode` does, and the latents of one source per prompt. Raise DataError for
        another number of them, ModelError for a size that the pipeline cannot make."""
        images = stacked(prompts, sources, self.most_sources)[:, 0]
        check_size(*images.shape[-2:], unit=PATCH * self._pipeline.vae_scale_factor)
        cond = self.encode(prompts) | {SOURCE: self.latents(images)}
        return cond | ({NEGATIVE + SOURCE: cond[SOURCE]} if self.guided else {})

    def _image(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        tokens, ids = super()._image(x, cond)
        if SOURCE not in cond:  # from the prompt alone, as the pipeline without an image
            return tokens, ids
        source = cond[SOURCE]
        behind = image_ids(source.shape[-2] // PATCH, source.shape[-1] // PATCH, x.device)
        behind[:, 0] = 1
        return torch.cat([tokens, pack(source.to(x.dtype))], 1), torch.cat([ids, behind])
