"""What an adapter states of its kind of model, for whoever asks before a weight is read: cost,
exports, rehearsals, doctor.

An adapter's file has a class on `Facts` and hands it to `options_of` beside its record of options;
what the class leaves out is as with most pipelines of images. The function is then known by the
class of its pipeline (`adapters`), whether its file stands here or in a package of the user's.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.models.lora import JOINT_ATTENTION
from flowrl.models.options import ADAPTERS

PATCH = 2  # a token is a square of 2 x 2 latents
# flowrl's arguments of a model -> those of its pipeline's call
CALL = {
    "guidance": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "negative_prompt": "negative_prompt",
    "guidance_rescale": "guidance_rescale",
    "cfg_normalization": "cfg_normalization",
    "max_sequence_length": "max_sequence_length",
    "original_size": "original_size",
    "crop": "crops_coords_top_left",
    "target_size": "target_size",
}
# values of these that change nothing
NEUTRAL: dict[str, Any] = {
    "true_cfg_scale": 1.0,
    "negative_prompt": "",
    "guidance_rescale": 0.0,
    "cfg_normalization": 0.0,
    "crop": (0, 0),
}
Parts = Mapping[str, Mapping[str, Any]]
"""The settings of a pipeline's parts, by name."""


class TextShape(NamedTuple):
    """The embeddings of one prompt, as `encode` of the adapter makes them."""

    tokens: int
    width: int
    pooled: int  # numbers besides the tokens; 0 = none


class Sizes(NamedTuple):
    """What one network call depends on."""

    latent: tuple[int, ...]  # [C, h, w], of videos [C, t, h, w]
    text: TextShape
    source: tuple[int, int] | None = None  # of an editing model: rows and columns of its latents


class Empty(NamedTuple):
    """Rows of a network call without numbers."""

    rows: int
    dtype: torch.dtype

    def __call__(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [*sizes] on the meta device."""
        return torch.empty(*sizes, device="meta", dtype=dtype or self.dtype)


class Facts:
    """What is known of all models that one adapter reads, from the settings of their parts."""

    pipeline: ClassVar[str] = ""  # the class of diffusers whose folders are read
    kind: ClassVar[str] = ""  # the class of the network that is trained
    spec: ClassVar[str] = ""  # what metadata of files call it
    network: ClassVar[str] = "transformer"  # the part that it is
    targets: ClassVar[Sequence[str]] = JOINT_ATTENTION  # what gets LoRA if a config names nothing
    # a released model: the sizes of latents and embeddings are those of all
    typical: ClassVar[str] = ""
    video: ClassVar[bool] = False  # latents with time
    discrete_levels: ClassVar[bool] = False  # the network knows its training timesteps alone
    wide: ClassVar[tuple[str, ...]] = ()  # parts that stay in float32
    # whether a prompt starts from images
    sources: ClassVar[Literal["never", "always", "if named"]] = "never"
    packed: ClassVar[int] = 1  # latents of a channel that are channels of the network's tokens
    table: ClassVar[str] = ""  # the setting that says where the network's positions end
    pooled: ClassVar[str] = ""  # the setting that says how many numbers a prompt has beside tokens
    more_tokens: ClassVar[int] = 0  # of text, beside those of max_sequence_length
    # options that save memory
    lighter: ClassVar[Mapping[str, Any]] = {}
    # arguments of the pipeline's call by options, and values of options that change nothing
    call: ClassVar[Mapping[str, str]] = CALL
    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL
    # whether the pipeline guides only if there is a negative prompt, be it an empty one
    needs_negative: ClassVar[bool] = False
    # whether the pipeline takes a negative prompt as embeddings alone
    negative_by_embeds: ClassVar[bool] = False
    # whether diffusers reads LoRA in the names of kohya's sd-scripts for it
    reads_kohya: ClassVar[bool] = True
    # tiny random pipelines by name, the adapter's own first, with their settings in the form of
    # assets/tiny.yaml; {}: those of this name there
    tiny: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def modelspec(self, settings: Mapping[str, Any]) -> str:
        """Return what the metadata of files on hubs and in ComfyUI call a network of these
        settings."""
        return self.spec or self.kind

    def left_out(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the parts of the pipeline that options leave unread."""
        return ()

    def tiny_for(self, parts: Parts) -> str:
        """Return the name of the tiny pipeline that is most like a model."""
        return next(iter(self.tiny), "")

    def latent_shape(
        self, parts: Parts, height: int, width: int, *, frames: int = 1
    ) -> tuple[int, ...]:
        """Return the shape of one latent, as the adapter will have it. Raise ModelError for a size
        that it will refuse."""
        settings, factor = parts[self.network], vae_factor(parts["vae"])
        most = settings.get(self.table) if self.table else None
        check_size(height, width, unit=self.unit(factor, settings), most=most)
        return int(settings["in_channels"]) // self.packed, height // factor, width // factor

    def unit(self, factor: int, settings: Mapping[str, Any]) -> int:
        """Return the pixels that a side is a multiple of; ``factor`` of them are one latent."""
        return PATCH * factor

    def vae_latent(self, latent: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what the VAE decodes to one image."""
        return latent

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the VAE of a run in ``dtype`` works."""
        return torch.float32 if "vae" in self.wide else dtype

    def source_shape(
        self, latent: tuple[int, ...], given: Mapping[str, Any], size: tuple[int, int], count: int
    ) -> tuple[int, int] | None:
        """Return rows and columns of the latents of a prompt's ``count`` sources as the network has
        them; None: no tokens of their own."""
        return None

    def text_shape(self, parts: Parts, given: Mapping[str, Any]) -> TextShape:
        """Return the sizes of one prompt's embeddings."""
        settings = parts[self.network]
        widths = ("joint_attention_dim", "cap_feat_dim", "text_dim", "cross_attention_dim")
        width = next(settings[name] for name in widths if settings.get(name))
        tokens = self.more_tokens + given.get("max_sequence_length", 0)
        return TextShape(tokens, width, int(settings[self.pooled]) if self.pooled else 0)

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the adapter hands its network in a call of ``empty.rows`` latents: names and
        shapes."""
        raise NotImplementedError

    def random_texts(
        self, count: int, shape: TextShape, *, device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return random embeddings {name: [count, ...]}, as `encode` makes them of prompts that are
        as long as they may be."""
        sizes: dict[str, tuple[int, ...]] = {"embeds": (count, shape.tokens, shape.width)}
        if shape.pooled:
            sizes["pooled"] = (count, shape.pooled)
        made = {}
        for name, size in sizes.items():
            made[name] = torch.randn(*size, device=device, dtype=dtype)
        return made

    def arguments(self, given: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
        """Return what the pipeline is called with for options, beside prompt, images, size and
        steps; what changes nothing is left out."""
        chosen: dict[str, Any] = {}
        for name, argument in self.call.items():
            value = given.get(name)
            plain = tuple(value) if isinstance(value, list) else value
            if plain is not None and plain != self.neutral.get(name):
                chosen[argument] = plain
        if self.needs_negative:
            chosen.pop("negative_prompt", None)
            if chosen.get("true_cfg_scale", 1.0) > 1:
                chosen["negative_prompt"] = given["negative_prompt"]
        return chosen

    def source_note(self, given: Mapping[str, Any]) -> str:
        """Say where a run scaled sources otherwise than the pipeline does; "" for nowhere."""
        return ""


def check_size(height: int, width: int, *, unit: int, most: int | None = None) -> None:
    """Raise ModelError unless both are positive multiples of ``unit`` pixels, and at most ``most``
    of them."""
    if height < 1 or width < 1 or height % unit or width % unit:
        raise ModelError(
            f"height and width must be positive multiples of {unit} pixels, got {height} x {width}"
        )
    if most and max(height, width) > most * unit:
        raise ModelError(
            f"height and width may be at most {most * unit} pixels here, got {height} x {width}"
        )


def vae_factor(settings: Mapping[str, Any]) -> int:
    """Return how many pixels of a side are one latent: each level of the VAE but one halves it."""
    blocks = settings.get("block_out_channels")
    count = len(settings["temperal_downsample"]) if blocks is None else len(blocks) - 1
    return int(2**count)


def guidance_input(empty: Empty, settings: Mapping[str, Any]) -> Tensor | None:
    """Return the guidance number of a network that has an input for it."""
    guided = settings.get("guidance_embeds", False)
    return empty(empty.rows, dtype=torch.float32) if guided else None


def behind(sizes: Sizes) -> Sizes:
    """Return sizes of a network whose sources stand behind the noisy tokens: those of a taller
    latent."""
    if sizes.source is None:
        return sizes
    channels, height, width = sizes.latent
    return sizes._replace(latent=(channels, height + sizes.source[0], width))


def facts_of(function: Callable[..., Any]) -> Facts | None:
    """Return what the adapter behind a config's ``model.fn`` states; None for other models."""
    return getattr(function, "facts", None)


def adapters() -> Mapping[str, Callable[..., Any]]:
    """Return all adapters by the class of their pipeline: of every file here, and of the user's
    packages that were imported by now."""
    package = importlib.import_module("flowrl.models")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"flowrl.models.{info.name}")
    return ADAPTERS


def fn_of(pipeline: str) -> str:
    """Return how a config names the adapter of a class of pipelines, "" where it has none."""
    make = adapters().get(pipeline)
    if make is None:
        return ""
    own = make.__module__ == f"flowrl.models.{make.__name__}"
    return make.__name__ if own else f"{make.__module__}.{make.__name__}"


def modelspec_of(kind: str, settings: Mapping[str, Any]) -> str:
    """Return what metadata call a network of this class: as an adapter says, else the class."""
    for make in adapters().values():
        if make.facts.kind == kind:  # type: ignore[attr-defined]
            return str(make.facts.modelspec(settings))  # type: ignore[attr-defined]
    return kind
