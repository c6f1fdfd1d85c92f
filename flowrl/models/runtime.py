"""How a network runs: the options in ``runtime`` that every adapter takes, for memory and for
speed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import torch
from diffusers import SD3Transformer2DModel
from pydantic import BaseModel, Field, field_validator, model_validator

from flowrl.core.errors import ModelError
from flowrl.models.attention import AUTO, avoid_cudnn, set_attention, unknown_back_end
from flowrl.models.norms import KERNEL, one_pass

COMPILER: Any = "inductor"  # torch's own default
# kinds of blocks, their inputs with and without a gradient, a batch of one: SD3.5 makes 12 and more
COMPILATIONS = 64
GRAPH_DEVICES = ("cuda",)  # where torch records what a compiled block launches


class Runtime(BaseModel, frozen=True, extra="forbid", strict=True):
    """How a network runs; only ``quantize`` and ``tf32`` change what is computed beyond the
    rounding of its dtype."""

    # activations are computed again in the backward pass instead of being kept
    checkpointing: bool = False
    attention: str = AUTO  # or a back end, by the name that diffusers gives it
    compile: bool = False  # each repeated block is compiled by torch.compile
    # the kernels of a compiled block are launched as one: recorded once for each size of inputs
    cuda_graphs: bool = False
    quantize: Literal["none", "nf4", "int8"] = "none"  # of the frozen weights under LoRA
    # float32 products, LoRA's under a short dtype among them, with 10 bits of mantissa on CUDA
    tf32: bool = False
    # RMS norms of diffusers in one kernel on CUDA; rounds once where diffusers rounds twice
    one_pass_norms: bool = True
    # text encoders and VAE are on the device only while they work, the encoders without the network
    offload: bool = False
    # where text encoders work; on the CPU they need none of the device's memory, ever
    text_encoders: Literal["device", "cpu"] = "device"
    # so many processes compute each sample together; one that is alone does so by itself
    context_parallel: Annotated[int, Field(ge=1)] = 1
    # a folder that keeps the embeddings of prompts
    cache: Annotated[str, Field(min_length=1)] | None = None

    @field_validator("attention")
    @classmethod
    def _known(cls, name: str) -> str:
        problem = unknown_back_end(name)
        if problem:
            raise ValueError(problem)
        return name

    @model_validator(mode="after")
    def _graphs_can_be_replayed(self) -> Self:
        if self.cuda_graphs and not self.compile:
            raise ValueError("cuda_graphs: are of compiled blocks, so it needs compile: true")
        # offload moves the network to the CPU and back: its weights then lie somewhere else
        if self.cuda_graphs and self.offload:
            raise ValueError(
                "offload: moves the network away from where recorded kernels read its weights, so "
                "it cannot be on with cuda_graphs: true; leave one out (text_encoders: cpu keeps "
                "the encoders off the device, too)"
            )
        return self

    def fuses_norms(self, device: str) -> bool:
        """Tell whether norms take one pass on that type of device; the compiler fuses them
        itself."""
        return KERNEL and self.one_pass_norms and device == "cuda" and not self.compile


def set_up(
    network: Any, runtime: Runtime, *, dtype: torch.dtype, device: torch.device, trains: bool
) -> None:
    """Make a diffusers network on the device run as asked; LoRA must be on it already, and nothing
    is computed yet.

    Raise ModelError if the attention back end does not work here, or for CUDA graphs elsewhere.
    """
    if runtime.cuda_graphs and device.type not in GRAPH_DEVICES:
        raise ModelError(
            f"runtime.cuda_graphs: needs a CUDA device, got {device}; leave it out: compile alone "
            "works here"
        )
    avoid_cudnn(runtime.attention, device=device, trains=trains)
    if runtime.fuses_norms(device.type):
        one_pass(network)
    if not (runtime.compile and runtime.attention == AUTO):  # the compiler brings its own
        set_attention(network, runtime.attention, dtype=dtype, device=device, trains=trains)
    if runtime.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True  # of the whole process
    if runtime.checkpointing:
        network.enable_gradient_checkpointing()
    if runtime.compile:
        compile_blocks(network, graphs=runtime.cuda_graphs)


def compile_blocks(network: Any, *, graphs: bool = False) -> None:
    """Compile the repeated blocks, once for all sizes of batch, image and text: blocks of a kind
    share the result.

    A kind is compiled once more for inputs that need a gradient, and for a batch of one. torch
    gives up compiling a function after 8 versions of it, which SD3.5's three kinds of blocks
    exceed: the limit is raised for the process. With ``graphs`` it is torch's mode
    "reduce-overhead": kernels are recorded and replayed; see `GraphSteps`.
    """
    import torch._dynamo.config as dynamo  # takes seconds to import

    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILATIONS)
    how: dict[str, Any] = {"backend": COMPILER, "dynamic": True}
    how |= {"mode": "reduce-overhead"} if graphs else {}
    if not isinstance(network, SD3Transformer2DModel):
        network.compile_repeated_blocks(**how)
        return
    # diffusers does not know which blocks of SD3 repeat.
    for block in network.transformer_blocks:
        block.compile(**how)
