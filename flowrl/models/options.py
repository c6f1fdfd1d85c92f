"""What an adapter says before a weight is read: its options, one typed record whose fields are the
keys of a config's `model` section, and its `Facts`, which cost, exports, rehearsals and doctor ask.

An adapter's file hands both to `options_of`; what its class on `Facts` leaves out is as with most
pipelines of images. The function is then known by the class of its pipeline (`adapters`), whether
its file stands here or in a package of the user's.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.devices import pick_device
from flowrl.core.errors import ConfigError, ModelError, unknown
from flowrl.models.prompt_encoding import MOST_T5_TOKENS
from flowrl.models.runtime import Runtime
from flowrl.models.tuning import JOINT_ATTENTION, LoraOptions, Names, Tuning, pick_dtype

STRICT = ConfigDict(strict=True, extra="forbid")  # no text is read as a number
Guidance = Annotated[FiniteFloat, Field(ge=0)]
DecodeBatch = Annotated[int, Field(ge=1, lt=2**31)]  # images that the VAE decodes at a time
T5Tokens = Annotated[int, Field(ge=1, le=MOST_T5_TOKENS)]

# pydantic's kind of mistake -> what was expected
EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "tuple_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "missing": "a value",
    "model_type": "options by name",
}

FEW_STEPS = re.compile(r"(?<![a-z])(schnell|turbo|lightning|hyper)(?![a-z])", re.IGNORECASE)

Record = TypeVar("Record")
Model = TypeVar("Model")


@dataclass(frozen=True, config=STRICT)
class PipelineOptions:
    """The options that every adapter takes: where the weights are, which are trained, and how.

    A subclass adds what sets its pipeline apart. **Differs:** float16 is refused for training.
    Gradients below 6e-8 vanish in it unless the loss is scaled up, which flowrl does not do;
    bfloat16 has float32's range.
    """

    path: str  # folder of a diffusers pipeline, or a Hugging Face id
    _: KW_ONLY
    tune: Literal["lora", "full", "none"] = "lora"
    lora: LoraOptions | None = None  # None: the defaults
    # with tune full: the linear layers that are trained, by the rule of lora.targets; None: all
    layers: Names | None = None
    # of frozen weights and of the arithmetic; trained weights are float32 always
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    seed: int | None = None  # draws the LoRA; None: the run's seed, 0 outside of a run
    runtime: Runtime | None = None  # how the network runs; None: the defaults
    # what guidance leads away from; None: no prompt at all, the embeddings are zeros
    negative_prompt: str | None = ""
    decode_batch: DecodeBatch = 4

    # the option that makes two branches, and above which value; "": none does
    branches: ClassVar[tuple[str, float]] = ("guidance", 1.0)
    # options that take the scale of that one where they are None
    same_guidance: ClassVar[tuple[str, ...]] = ()

    @property
    def cfg_scale(self) -> float:
        """Return the scale of classifier-free guidance; above 1 there are two branches."""
        return float(getattr(self, self.branches[0], 1.0)) if self.branches[0] else 1.0

    @property
    def guided(self) -> bool:
        """Tell whether there are two branches, as the pipelines' do_classifier_free_guidance."""
        return self.cfg_scale > 1

    def guided_by(self, scale: float, *, off: bool = False) -> Self:
        """Return the same options with another scale of classifier-free guidance, with `off` also
        the scale of one branch alone. Raises ConfigError where no option makes two branches, or the
        scale makes none."""
        name, least = self.branches
        if not name:
            raise ConfigError(
                f"guidance: {self.path} is told its guidance as a number, and no option samples "
                "with and without the prompt"
            )
        if scale < least or (scale == least and not off):
            above = f"of at least {least:g}" if off else f"above {least:g}"
            raise ConfigError(f"guidance: expected a scale {above}, got {scale:g}")
        change: dict[str, Any] = {name: scale, **dict.fromkeys(self.same_guidance)}
        if scale == least:  # one branch alone: options that only two have are no mistake then
            fields = type(self).__dataclass_fields__
            for only in {"negative_prompt", "guidance_rescale"} & fields.keys():
                change[only] = fields[only].default
        return replace(self, **change)

    @property
    def how(self) -> Runtime:
        """Return how the network runs, defaults filled in."""
        return self.runtime or Runtime()

    @model_validator(mode="after")
    def _check_tuning(self) -> Self:
        # an option without effect is an error: somebody believes that it has one
        if self.lora is not None and self.tune != "lora":
            raise ValueError(
                f"model.lora has no effect unless model.tune is lora, got {self.tune!r}: set "
                "model.tune to lora, or leave model.lora out, on a command line with "
                "model.lora=null"
            )
        if self.layers is not None and self.tune != "full":
            raise ValueError(
                f"model.layers has no effect unless model.tune is full, got {self.tune!r}: set "
                "model.tune to full, or leave model.layers out, on a command line with "
                "model.layers=null (LoRA's layers are model.lora.targets)"
            )
        # quantised weights have no gradient
        if self.how.quantize != "none" and self.tune != "lora":
            raise ValueError(
                "runtime.quantize: quantised weights are frozen, so it needs tune 'lora', got "
                f"{self.tune!r}"
            )
        # float16 needs a scaled loss, which flowrl does not have
        if self.dtype == "float16" and self.tune != "none":
            raise ValueError(
                "dtype: float16 cannot train: small gradients vanish in it, as flowrl does not "
                "scale the loss. Set it to bfloat16 or float32 (with tune none, float16 can be "
                "used to sample)"
            )
        return self

    @model_validator(mode="after")
    def _check_negative_prompt(self) -> Self:
        default = type(self).__dataclass_fields__["negative_prompt"].default
        if self.negative_prompt not in (None, "", default) and not self.guided:
            name, least = self.branches
            if not name:
                raise ValueError(
                    "negative_prompt: has no effect: the network is told its guidance, and no "
                    f"option leads away from a prompt; got {self.negative_prompt!r}"
                )
            raise ValueError(
                f"negative_prompt: has no effect unless {name} is above {least:g}, got {name} "
                f"{getattr(self, name)!r} (train.guidance and train.reference_guidance lead away "
                "from the default one)"
            )
        return self


ADAPTERS: dict[str, Callable[..., Any]] = {}
"""Adapters by the class of their pipeline that were imported by now; `adapters` has them all."""


def options_of(
    record: Callable[..., Record], facts: Any = None
) -> Callable[..., Callable[..., Any]]:
    """Let a function of one record be called with the record's fields as arguments.

    Its signature becomes the record's, which is what a config binds to. A mistake raises
    ConfigError before the function is entered, so before any weight is read. With ``facts``
    (`Facts`) it is an adapter: pipelines of their class are loaded by it.
    """

    def decorate(build: Callable[[Record], Model]) -> Callable[..., Model]:
        @functools.wraps(build)
        def call(*args: Any, **kwargs: Any) -> Model:
            return build(checked_options(record, *args, **kwargs))

        call.options = functools.partial(checked_options, record)  # type: ignore[attr-defined]
        call.__signature__ = _evaluated_signature(record)  # type: ignore[attr-defined]
        if facts is not None:
            call.facts = facts  # type: ignore[attr-defined]
            if call.__module__.startswith("flowrl."):
                ADAPTERS.setdefault(facts.pipeline, call)
            else:  # the user's goes first
                ADAPTERS[facts.pipeline] = call
        return call

    return decorate


def checked_options(record: Callable[..., Record], *args: Any, **kwargs: Any) -> Record:
    """Make a record of pydantic. Raise ConfigError that names every mistake in it."""
    try:
        return record(*args, **kwargs)
    except ValidationError as error:
        known = inspect.signature(record).parameters
        raise ConfigError("\n".join(_mistakes(error, [*known]))) from error


def _evaluated_signature(record: Callable[..., Any]) -> inspect.Signature:
    """Return a record's signature with types in place of their names."""
    hints = typing.get_type_hints(record, include_extras=True)
    signature = inspect.signature(record)
    parameters = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]
    return signature.replace(parameters=parameters)


def _mistakes(error: ValidationError, known: list[str]) -> Iterator[str]:
    """Say each mistake as ``option: expected ..., got ...``."""
    nested = {"lora": list(LoraOptions.model_fields), "runtime": list(Runtime.model_fields)}
    for found in error.errors():
        where = ".".join(map(str, found["loc"]))
        if found["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            owner, _, name = where.rpartition(".")
            owner = owner or "model"
            yield f"{owner} {unknown(name, nested.get(owner, known), 'option')}"
        elif found["type"] == "value_error":
            text = str(found["ctx"]["error"])
            yield f"{where}: {text}" if where else text
        else:
            text = EXPECTED.get(found["type"], found["msg"].removeprefix("Input should be "))
            expected = text.format(**found.get("ctx", {}))
            yield f"{where}: expected {expected}, got {found['input']!r}"


def warn_if_distilled(path: str, *, known: bool = False) -> None:
    """Warn if a model is known to be distilled to a few steps, or has a name that says so. Called
    by the function that loads a model, on behalf of who called that one."""
    if known or FEW_STEPS.search(Path(path).name):
        warnings.warn(
            f"{path} looks distilled to a few steps, like FLUX.1-schnell. Users of several methods "
            "report that such models blur and collapse under reinforcement learning: watch the "
            "image grids, keep a KL penalty and a low learning rate, or train the model that it "
            "was made of, such as FLUX.1-dev",
            stacklevel=4,
        )


def pick_tuning(options: PipelineOptions, targets: Sequence[str]) -> Tuning:
    """Pick device and dtype; ``targets`` get LoRA if the options name none. Raise ConfigError for
    a device that is not here."""
    lora = options.lora or LoraOptions()
    device = pick_device(options.device)
    return Tuning(
        tune=options.tune,
        lora=lora,
        targets=lora.targets or targets,
        layers=options.layers,
        seed=options.seed or 0,
        device=device,
        dtype=pick_dtype(options.dtype, device),
        runtime=options.how,
    )


# ------------------------------------------------ what an adapter states of its kind of model


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
