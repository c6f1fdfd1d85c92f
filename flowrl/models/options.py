"""The options of a model: one typed record per adapter, whose fields are the keys of a config's
`model` section.

`Tuning` is what they make concrete: which weights are trained, in which dtype, and where.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import ConfigDict, Field, FiniteFloat, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from torch import nn

from flowrl.core.devices import DTYPES, pick_device
from flowrl.core.errors import ConfigError, unknown
from flowrl.models.lora import LoraOptions, Names, add_lora, find_layers
from flowrl.models.prompt_encoding import MOST_T5_TOKENS
from flowrl.models.runtime import Runtime

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
        return 1.0

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
"""Adapters by the class of their pipeline; `flowrl.models.facts.adapters` has them all."""


def options_of(
    record: Callable[..., Record], facts: Any = None
) -> Callable[..., Callable[..., Any]]:
    """Let a function of one record be called with the record's fields as arguments.

    Its signature becomes the record's, which is what a config binds to. A mistake raises
    ConfigError before the function is entered, so before any weight is read. With ``facts``
    (`flowrl.models.facts.Facts`) it is an adapter: pipelines of their class are loaded by it.
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


class Tuning(NamedTuple):
    """What `pick_tuning` makes of the options."""

    tune: str
    lora: LoraOptions
    targets: Sequence[str]  # names of the layers that get LoRA
    layers: Sequence[str] | None
    seed: int
    device: torch.device
    dtype: torch.dtype  # of frozen weights and of the arithmetic; trained weights are float32
    runtime: Runtime = Runtime()

    @property
    def autocast(self) -> bool:
        """Tell whether float32 master weights are computed with in another dtype."""
        return self.tune == "full" and self.dtype != torch.float32

    @property
    def network_dtype(self) -> torch.dtype:
        """Return the dtype that the network is loaded in: full tuning keeps all of it in
        float32."""
        return torch.float32 if self.tune == "full" else self.dtype


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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; ``auto`` is bfloat16 on CUDA and on CPUs that multiply in it,
    else float32."""
    if name != "auto":
        return DTYPES[name]
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    fast = device.type == "cuda" or able.get("avx512_bf16") or able.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def tune_network(network: nn.Module, tuning: Tuning) -> None:
    """Make trainable what was asked for in a frozen network. Raise ModelError if a target or a
    layer is not there."""
    if tuning.tune == "lora":
        add_lora(network, tuning.lora, tuning.targets, seed=tuning.seed)
    if tuning.tune == "full":
        for module in fully_trained(network, tuning):
            module.requires_grad_(True)
    network.eval()


def fully_trained(network: nn.Module, tuning: Tuning) -> list[nn.Module]:
    """Return the modules whose own weights are trained under ``tune: full``. Raise ModelError for
    a layer that is not there."""
    if tuning.layers is None:
        return [network]
    return find_layers(network, tuning.layers, "layers")


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained by their name in the network, in module order."""
    return {name: param for name, param in network.named_parameters() if param.requires_grad}
