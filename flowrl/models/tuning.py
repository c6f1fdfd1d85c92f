"""What of a network is trained, and how: in full, in part, or by low-rank adapters (LoRA, Hu et al.
2021) through peft, drawn from a seed and kept in float32.

The adapters' products are those of mixed precision: the kept weights are rounded to the network's
dtype in every call, as torch.autocast does it in published code. **Differs:** peft widens the input
to float32 instead, and multiplies, adds and keeps it there; docs/memory.md has what that cost on an
H200.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn.functional import linear

from flowrl.core.devices import DTYPES
from flowrl.core.errors import ModelError
from flowrl.core.seeds import generator
from flowrl.models.runtime import Runtime

JOINT_ATTENTION = (  # of transformers that attend to image and text at once
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
UNET_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # of both attentions of a block

Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]  # of layers; not empty

# An adapter of a rank above a layer's smaller side can do no more than one of that rank, and which
# layers there are is known only with the model: the widest attention layers here, FLUX.2's, have
# 6144 numbers on either side.
MAX_RANK = 6144


class LoraOptions(BaseModel, frozen=True, extra="forbid", strict=True):
    """Size and place of the adapters; the defaults are Flow-GRPO's for SD3
    (scripts/train_sd3.py)."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0  # the update is scaled by alpha / rank
    # a linear layer is adapted if its name is, or ends in, a dot and one of these; None: the
    # attention projections, of SD3.5 Medium without its second attention (attn2), as in
    # Flow-GRPO's list; of Qwen-Image, Z-Image, FLUX.2 and Wan the MLPs, too
    targets: Names | None = None
    # A ~ N(0, 1/rank^2), B = 0, so that the adapted network starts as the base network
    init: Literal["gaussian"] = "gaussian"
    # compute what the adapters add in float32 whatever the network's dtype, as peft does
    float32: bool = False


class RoundedLinear(nn.Linear):
    """A linear layer that rounds its weight to the dtype of its input x [..., in] -> [..., out]."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T in the dtype of x."""
        return linear(x, self.weight.to(x.dtype))


def add_lora(
    network: Any, lora: LoraOptions, targets: Sequence[str], *, seed: int
) -> dict[str, nn.Parameter]:
    """Put adapters on the layers ``targets`` of a diffusers network, freeze the rest and return
    the adapters' parameters by name.

    **Differs:** peft draws A from the global generator in the dtype of the base; here A is drawn in
    float32 from ``seed`` alone, so that every rank, device and base dtype starts from the same
    adapters. Raise ModelError if a target matches no linear layer.
    """
    # Let peft put its layers in place.
    targets = _of_linear_layers(network, targets)
    network.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=0.0,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        network.add_adapter(config)

    # Draw their values anew, in float32: an optimizer step of 1e-4 on a bfloat16 weight would be
    # lost to rounding.
    params = trained_parameters(network)
    for name, start in first_values(params, lora, seed=seed):
        params[name].data = start.to(params[name].device)
    if not lora.float32:
        _round_products(network)
    return params


def _round_products(network: nn.Module) -> None:
    """Let adapters multiply in the dtype of their inputs."""
    for layer in network.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = False  # peft's switch for the widening of inputs
            for part in (layer.lora_A, layer.lora_B):
                for adapter in part.values():
                    adapter.__class__ = RoundedLinear


def first_values(
    params: Mapping[str, nn.Parameter], lora: LoraOptions, *, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapter's name and first values, in its shape, float32 on the CPU, from ``seed``
    alone."""
    stream = generator(seed, "lora")
    for name, param in params.items():
        start = torch.zeros(param.shape)
        if ".lora_A." in name:
            start = torch.randn(param.shape, generator=stream) / lora.rank
        yield name, start


def _of_linear_layers(network: nn.Module, targets: Sequence[str]) -> Sequence[str]:
    """Return ``targets``, or where one of them also names a module of another kind, which peft
    refuses, the full names of the linear layers. Raise ModelError as `find_layers`.

    FLUX.2's attn.to_out is a linear layer in its single blocks and a list in its double ones.
    """
    found = set(find_layers(network, targets, "lora.targets"))
    modules = dict(network.named_modules())
    ends = tuple(f".{target}" for target in targets)
    named = {name for name in modules if f".{name}".endswith(ends)}
    linear = [name for name, module in modules.items() if module in found]
    return targets if named == set(linear) else linear


@contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Run a network as if it had no adapters. What they add is not computed; gradients of calls
    outside are not touched, as peft's own switch would."""
    layers = [module for module in network.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def find_layers(network: nn.Module, names: Sequence[str], where: str) -> list[nn.Module]:
    """Return the linear layers whose name is, or ends in, a dot and one of ``names``.

    Raise ModelError if a name has no layer; ``where`` is the option that gave the names.
    """
    modules = network.named_modules()
    linear = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    found: dict[str, nn.Module] = {}
    for wanted in names:
        fitting = [name for name in linear if name == wanted or name.endswith(f".{wanted}")]
        if not fitting:
            short = sorted({re.sub(r"^.*\.\d+\.(?=\D)", "", name) for name in linear})
            raise ModelError(
                f"{where}: no linear layer is named {wanted!r}; available: {', '.join(short)}"
            )
        found |= {name: linear[name] for name in fitting}
    return list(found.values())


# ------------------------------------------- targets that nobody published: found by structure


ATTENTION = re.compile(r"(^|[._])(attn|attention|self_attn|cross_attn)\d*($|[._])")


def lora_targets(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the linear layers inside of attention; of a network that names nothing
    so, of all that are in repeated blocks. Short names where they mean the same layers. Raise
    ModelError where there are none."""
    linear = [name for name, part in network.named_modules() if isinstance(part, nn.Linear)]
    found = [name for name in linear if ATTENTION.search(name)]
    found = found or [name for name in linear if re.search(r"\.\d+\.", name)]
    if not found:
        raise ModelError(
            f"lora.targets: no linear layer of {type(network).__name__} is in attention or a "
            "repeated block; name the layers"
        )
    return short_names(found, linear)


def short_names(found: Sequence[str], linear: Sequence[str]) -> tuple[str, ...]:
    """Return the ends behind the last number of a block, where no other layer has the same, else
    whole names."""
    ends: dict[str, None] = {}
    chosen = set(found)
    for name in found:
        end = re.sub(r"^.*?\.\d+\.(?=[^.]*\D)", "", name)
        same = {one for one in linear if one == end or one.endswith(f".{end}")}
        if not same <= chosen:
            end = name
        ends[end] = None
    return tuple(ends)


# ------------------------------------------------------------------- what is trained, made concrete


class Tuning(NamedTuple):
    """What `flowrl.models.options.pick_tuning` makes of a model's options."""

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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; ``auto`` is bfloat16 on CUDA and on CPUs that multiply in it,
    else float32."""
    if name != "auto":
        return DTYPES[name]
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if device.type == "cuda" or able.get("avx512_bf16") or able.get("amx_bf16"):
        return torch.bfloat16
    return torch.float32


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
