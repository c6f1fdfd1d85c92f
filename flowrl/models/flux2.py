"""FLUX.2 as a FlowModel, over the public diffusers Flux2Pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.core.errors import ModelError
from flowrl.core.types import Cond, Source
from flowrl.models.adapter import (
    FlowMatchingModel,
    check_scheduler,
    grid_positions,
    guidance_rows,
)
from flowrl.models.files.loading import PipelinePart
from flowrl.models.options import (
    PATCH,
    STRICT,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    behind,
    check_size,
    guidance_input,
    options_of,
    pick_tuning,
    vae_factor,
)
from flowrl.models.prompt_encoding import NEGATIVE, SOURCE, stacked
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning
from flowrl.models.tuning import JOINT_ATTENTION

APART = 10  # between the times of the image, of its first reference, of the next
NETWORK_PARTS = {
    "transformer": PipelinePart(("Flux2Transformer2DModel",)),
    "scheduler": PipelinePart(("FlowMatchEulerDiscreteScheduler",)),
    "vae": PipelinePart(("AutoencoderKLFlux2",)),
}
PARTS = NETWORK_PARTS | {
    "text_encoder": PipelinePart(("Mistral3ForConditionalGeneration",)),
    "tokenizer": PipelinePart(("PixtralProcessor",)),
}
# attention and both MLPs of the double blocks, as X-GenGroup/Flow-Factory trains them; the single
# blocks fuse theirs
TARGETS = (
    *JOINT_ATTENTION,
    "ff.linear_in",
    "ff.linear_out",
    "ff_context.linear_in",
    "ff_context.linear_out",
    "attn.to_qkv_mlp_proj",
    "attn.to_out",
)
Tokens = Annotated[int, Field(ge=1, le=512)]  # of a prompt with its template


class Flux2Facts(Facts):
    """What is known of all models that `flux2` reads."""

    pipeline = "Flux2Pipeline"
    kind = "Flux2Transformer2DModel"
    spec = "flux-2"
    targets = TARGETS
    typical = "black-forest-labs/FLUX.2-dev"
    sources = "if named"
    tiny = {"flux2": {}}

    def latent_shape(
        self, parts: Parts, height: int, width: int, *, frames: int = 1
    ) -> tuple[int, int, int]:
        """Return the shape of one latent: 2 x 2 of the VAE's."""
        unit = PATCH * vae_factor(parts["vae"])
        check_size(height, width, unit=unit)
        return int(parts["transformer"]["in_channels"]), height // unit, width // unit

    def vae_latent(self, latent: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what the VAE decodes."""
        channels, height, width = latent
        return channels // PATCH**2, PATCH * height, PATCH * width

    def source_shape(
        self, latent: tuple[int, ...], given: Mapping[str, Any], size: tuple[int, int], count: int
    ) -> tuple[int, int] | None:
        """Return rows and columns of references that are laid under each other."""
        return (count * latent[1], latent[2]) if count else None

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given; the tokens of references stand behind the others."""
        rows, text, meta = empty.rows, sizes.text, torch.device("meta")
        channels, height, width = behind(sizes).latent
        return {
            "hidden_states": empty(rows, height * width, channels),
            "timestep": empty(rows),
            "guidance": guidance_input(empty, parts["transformer"]),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
            "txt_ids": positions(1, 1, text.tokens, meta),
            "img_ids": positions(height, width, 1, meta),
        }


FACTS = Flux2Facts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Flux2Options(PipelineOptions):
    """The options of `flux2`."""

    guidance: Guidance = 4.0  # the number that the network is given; the pipeline's default
    max_sequence_length: Tokens = 512
    branches: ClassVar[tuple[str, float]] = ("", 0.0)


Options = TypeVar("Options", bound=PipelineOptions)


@options_of(Flux2Options, FACTS)
def flux2(options: Flux2Options) -> Flux2:
    """Load a FLUX.2 pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `Flux2Options` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model; FLUX.2 klein is `flux2_klein`.
    """
    tuning = pick_tuning(options, TARGETS)
    loaded = load_for_tuning(Flux2Pipeline, options.path, PARTS, tuning)
    check_tokens(loaded.pipeline, options.path)
    if not loaded.pipeline.transformer.config.guidance_embeds:
        raise ModelError(
            f"{options.path}: transformer/config.json must have guidance_embeds true; a network "
            "without an input for guidance is FLUX.2 klein's: take model.fn flux2_klein"
        )
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length)
    return Flux2(tuned, options)


class Flux2Network(FlowMatchingModel[Options]):
    """What FLUX.2 and FLUX.2 klein share: network, VAE and grid.

    Latents are [128,h,w], a token of the network each: 2 x 2 of the VAE's 32 channels, normalised
    by the statistics of its batch norm. The pipeline's generator draws them in this shape, so
    equal seeds give equal noise. The shift of `sigmas` depends on the number of tokens and on the
    number of steps. Conditioning is ``embeds`` [G,T,D], three layers of the language model side by
    side, always of ``max_sequence_length`` tokens: the network also attends to those that fill a
    prompt up, so another length is another image.

    Prompts may have references: their latents, the mode of the VAE's posterior, stand behind the
    noisy tokens at the times 10, 20 and so on, where the image's own time is 0. They are
    conditioning, ``source`` [G,n,128,h,w]: no noise is put on them, the shift of `sigmas` does not
    count them, both branches of guidance see them. **Differs:** the pipeline gives all of its
    prompts the same references, as large as they are up to an area of 1024 x 1024; here each prompt
    has its own, as large as the image.
    """

    facts: ClassVar[Facts] = FACTS
    even_steps = True
    reads_flow_sigmas = True
    fewest_sources, most_sources = 0, 10  # ours: the pipeline counts none
    guidance: float | None = None  # the number that the network is given

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Return what `encode` does, and the latents of each prompt's references, where there are
        any. Raise DataError for prompts with more of them than others, ModelError for a size that
        the pipeline cannot make."""
        cond = self.encode(prompts)
        if not any(sources):
            return cond
        images = stacked(prompts, sources, self.most_sources)
        check_size(*images.shape[-2:], unit=PATCH * self._pipeline.vae_scale_factor)
        cond[SOURCE] = self.latents(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        return cond | ({NEGATIVE + SOURCE: cond[SOURCE]} if self.guided else {})

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B], rounded where the pipeline rounds it:
        before it divides. Sampling and training both come here."""
        return self._timesteps(sigma).to(self.dtype) / 1000

    def _mu(self, steps: int, tokens: int) -> float:
        return compute_empirical_mu(tokens, steps)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        rows, columns = x.shape[-2:]
        tokens, ids = _with_references(x, cond)
        named = {
            "hidden_states": tokens.to(self.dtype),
            "timestep": self.time(sigma),
            "guidance": guidance_rows(self.guidance, x),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "txt_ids": positions(1, 1, cond["embeds"].shape[1], x.device),
            "img_ids": ids,
        }
        found = self._tuned.call(named=named)[:, : rows * columns]
        return found.transpose(1, 2).unflatten(2, (rows, columns))

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _ = self._pipeline.encode_prompt(
            [prompt],
            device=self.text_device,
            max_sequence_length=self.options.max_sequence_length,  # type: ignore[attr-defined]
        )
        return {"embeds": embeds[0]}

    def _decode(self, x0: Tensor) -> Tensor:
        vae = self._pipeline.vae
        latents = x0.to(vae.device, vae.dtype)
        mean, std = self._moments(latents)
        return self._images(pixel_shuffle(latents * std + mean, PATCH))

    def _from_vae(self, latents: Tensor) -> Tensor:
        tokens = pixel_unshuffle(latents, PATCH)
        mean, std = self._moments(tokens)
        return (tokens - mean) / std

    def _moments(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and std [C,1,1] of each channel of a token."""
        vae = self._pipeline.vae
        std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
        return vae.bn.running_mean.to(latents)[:, None, None], std.to(latents)[:, None, None]


class Flux2(Flux2Network[Flux2Options]):
    """A FlowModel around one Flux2Pipeline, whose network is told a guidance number."""

    def __init__(self, tuned: TunedPipeline, options: Flux2Options) -> None:
        super().__init__(tuned, options)
        self.guidance = options.guidance


def _with_references(x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
    """Return the tokens [B,N,C] of x [B,C,h,w], row by row, then those of each reference, and their
    positions [N,4]."""
    references = cond[SOURCE].to(x.dtype).unbind(1) if SOURCE in cond else ()
    tokens, ids = [], []
    for place, latents in enumerate((x, *references)):
        tokens.append(latents.flatten(2).transpose(1, 2))
        where = positions(latents.shape[-2], latents.shape[-1], 1, x.device)
        where[:, 0] = APART * place
        ids.append(where)
    return torch.cat(tokens, 1), torch.cat(ids)


def positions(rows: int, columns: int, tokens: int, device: torch.device) -> Tensor:
    """Return the positions [rows columns tokens, 4] of tokens: 0, row, column, place in the
    text."""
    return grid_positions((1, rows, columns, tokens), device)


def check_tokens(pipeline: Any, path: str) -> None:
    """Raise ModelError if the network's tokens are not 2 x 2 latents of the VAE."""
    check_scheduler(pipeline, path)
    config, channels = pipeline.transformer.config, pipeline.vae.config.latent_channels
    wanted = channels * PATCH**2
    sizes = {config.in_channels, config.out_channels or config.in_channels, wanted}
    if config.patch_size != 1 or len(sizes) > 1:
        raise ModelError(
            f"{path}: the network must have patch_size 1, and take and give {wanted} channels, 2 "
            f"x 2 of the VAE's {channels}; got patch_size {config.patch_size}, in_channels "
            f"{config.in_channels}, out_channels {config.out_channels}"
        )
