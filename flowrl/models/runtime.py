"""How a network runs: the options in ``runtime`` that every adapter takes, for memory and for speed."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

import torch
from diffusers import SD3Transformer2DModel

from flowrl.errors import ConfigError
from flowrl.models.attention import check_name, set_attention

QUANTIZE = ("none", "nf4", "int8")
COMPILER: Any = "inductor"  # torch's own default
COMPILATIONS = 64  # kinds of blocks, their inputs with and without a gradient, a batch of one: SD3.5 makes 12 and more


class Runtime(NamedTuple):
    """What every adapter can be told about how it runs; only ``quantize`` changes what is computed beyond rounding."""

    checkpointing: bool = False  # activations are computed again in the backward pass instead of being kept
    attention: str = "native"  # the back end, by the name that diffusers gives it
    compile: bool = False  # each repeated block is compiled by torch.compile
    quantize: str = "none"  # of the frozen weights under LoRA
    offload: bool = False  # text encoders and VAE are on the device only while they work
    cache: str | None = None  # a folder that keeps the embeddings of prompts


def runtime_from(options: dict[str, Any] | None) -> Runtime:
    """Check the user's ``runtime`` options against the fields of Runtime. Raise ConfigError."""
    if options is not None and not isinstance(options, dict):
        raise ConfigError(f"runtime: expected options by name, got {options!r}")
    for name in options or {}:
        if name not in Runtime._fields:
            near = difflib.get_close_matches(str(name), Runtime._fields, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"runtime: unknown option {name!r}{hint} (there is: {', '.join(Runtime._fields)})")
    runtime = Runtime(**(options or {}))
    for name in ("checkpointing", "compile", "offload"):
        if not isinstance(getattr(runtime, name), bool):
            raise ConfigError(f"runtime.{name}: expected true or false, got {getattr(runtime, name)!r}")
    if runtime.quantize not in QUANTIZE:
        raise ConfigError(f"runtime.quantize: expected one of {', '.join(QUANTIZE)}, got {runtime.quantize!r}")
    if runtime.cache is not None and (not isinstance(runtime.cache, str) or not runtime.cache):
        raise ConfigError(f"runtime.cache: expected the path of a folder or null, got {runtime.cache!r}")
    check_name(runtime.attention)
    return runtime


def set_up(network: Any, runtime: Runtime, *, dtype: torch.dtype, device: torch.device, trains: bool) -> None:
    """Make a diffusers network on the device run as asked; LoRA must be on it already, and nothing is computed yet.

    Raise ModelError if the attention back end does not work here.
    """
    if runtime.attention != "native":
        set_attention(network, runtime.attention, dtype=dtype, device=device, trains=trains)
    if runtime.checkpointing:
        network.enable_gradient_checkpointing()
    if runtime.compile:
        compile_blocks(network)


def compile_blocks(network: Any) -> None:
    """Compile the repeated blocks, once for all sizes of batch, picture and text: blocks of a kind share the result.

    A kind is compiled once more for inputs that need a gradient, and for a batch of one. torch gives up compiling a
    function after 8 versions of it, which SD3.5's three kinds of blocks exceed: the limit is raised for the process.
    """
    import torch._dynamo.config as dynamo  # takes seconds to import

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILATIONS)
    if isinstance(network, SD3Transformer2DModel):  # diffusers does not know which of its blocks repeat
        for block in network.transformer_blocks:
            block.compile(backend=COMPILER, dynamic=True)
    else:
        network.compile_repeated_blocks(backend=COMPILER, dynamic=True)
