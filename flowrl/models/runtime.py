"""How a network runs: the options in ``runtime`` that every adapter takes, for memory and for
speed.

They are: attention back ends by the names that diffusers gives them, tried out before a network
gets one; regional compilation and CUDA graphs; RMS norms in one pass; quantised weights under LoRA;
and several processes that compute each sample together. The last is diffusers' context parallelism
by Ulysses (DeepSpeed-Ulysses, 2309.14509): each process has a part of the tokens, and within
attention all tokens of a part of the heads. Ring attention is not offered: in diffusers 0.42
torch's own attention, the only back end that was proven here, refuses it.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, Self

import diffusers
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
import transformers
from diffusers import (
    BitsAndBytesConfig,
    ContextParallelConfig,
    PipelineQuantizationConfig,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    TorchAoConfig,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from diffusers.models.normalization import RMSNorm
from pydantic import BaseModel, Field, field_validator, model_validator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flowrl.core.errors import ConfigError, ModelError, install, near
from flowrl.core.processes import context_mesh, world
from flowrl.models.files.loading import first_line

COMPILER: Any = "inductor"  # torch's own default
# kinds of blocks, their inputs with and without a gradient, a batch of one: SD3.5 makes 12 and more
COMPILATIONS = 64
GRAPH_DEVICES = ("cuda",)  # where torch records what a compiled block launches

# PyTorch's own kernel; before, its RMS norm on CUDA is written out as well
KERNEL: bool = torch.__version__ >= "2.9"  # as versions, not as texts

PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}
NF4_DEVICES = ("cuda",)  # where diffusers loads bitsandbytes' weights

NAMES = tuple(backend.value for backend in AttentionBackendName)
AUTO = "auto"  # the network's own attention; on a CPU in bfloat16 that of attend_in_groups
CUDNN = AttentionBackendName._NATIVE_CUDNN.value
HUB = "_hub"  # ending of the names whose code is fetched from the Hugging Face hub
LOCAL = tuple(name for name in NAMES if not name.endswith(HUB))
Attend = Callable[..., Tensor]  # as scaled_dot_product_attention
SHORT = 512  # keys: above, the fused kernel, which keeps no weights
GROUP = 2**20  # attention weights computed at a time
LOUD = 100.0  # values that a mask must hide; those that may be seen are standard normal
# These call torch's attention themselves: set_attention_backend leaves them as they are, without a
# word.
_DIRECT = (AttnProcessor2_0, JointAttnProcessor2_0)  # of UNets and of SD3
# Networks that hide the empty tokens of short prompts by a mask. Z-Image does where prompts of
# several lengths share a call.
MASKED = (QwenImageTransformer2DModel, ZImageTransformer2DModel)


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


def avoid_cudnn(name: str, *, device: torch.device, trains: bool) -> None:
    """Let torch's attention, which picks a kernel by itself, not pick cuDNN's where it is trained
    on CUDA; for the whole process, unless `name` is cuDNN's.

    From PyTorch 2.11 on it is the first choice on an H100 or H200. Its backward pass fails there
    for FLUX (seen on an H200), and has gradients that are no numbers under a mask
    of some lengths (pytorch/pytorch issue 196678).
    """
    if trains and device.type == "cuda" and name != CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)


def unknown_back_end(name: str) -> str:
    """Say what is wrong with a name that diffusers does not know or has no code for here; an empty
    text if nothing is."""
    if name in (AUTO, *LOCAL):
        return ""
    if name in NAMES:
        return (
            f"{name!r} fetches code from the Hugging Face hub and runs it, which flowrl never "
            f"does; install the package and take one of {', '.join(LOCAL)}"
        )
    known = f"{AUTO!r}, or one of diffusers: {', '.join(LOCAL)}"
    return f"unknown back end {name!r}{near(name, LOCAL)} ({known})"


def set_attention(
    network: Any, name: str, *, dtype: torch.dtype, device: torch.device, trains: bool
) -> None:
    """Let a diffusers network attend by a back end. Raise ModelError, with those that work here, if
    it does not.

    ``auto`` changes nothing but on a CPU in bfloat16, where SD3 and UNets attend by
    `attend_in_groups`.

    **Differs:** diffusers' set_attention_backend also changes the default of the process, and
    changes nothing in SD3 and in UNets; here the default stays, and the attention of those networks
    is sent to the back end, too.
    """
    if name == AUTO:
        # training is faster this way: see `attend_in_groups`
        if device.type == "cpu" and dtype == torch.bfloat16:
            _route(network, _in_groups)
        return
    # tried with small tensors: better refused here than in the first step
    tried = partial(_trial_problem, dtype=dtype, device=device, trains=trains)
    masked = isinstance(network, MASKED)
    reason = tried(name, masked=masked)
    if reason:
        able = [other for other in LOCAL if not tried(other, masked=masked)]
        how = [" with a gradient"] * trains + [" with the mask of its prompts"] * masked
        raise ModelError(
            f"runtime.attention: {name!r} does not work here in "
            f"{str(dtype).removeprefix('torch.')} on {device}{''.join(how)}: {reason}. Available: "
            f"{', '.join(able)}"
        )
    with quiet(), attention_backend():  # puts the process's default back
        network.set_attention_backend(name)
    # the networks that diffusers' setter leaves as they are
    _route(network, partial(_by_back_end, name))


def _route(network: Any, attend: Attend) -> None:
    """Let a function compute what a network's processors ask of torch's attention."""
    # Z-Image's network has no such list, and its processors call diffusers' dispatch
    processors = getattr(network, "attn_processors", {})
    if any(isinstance(processor, _DIRECT) for processor in processors.values()):
        routed = dict(processors)
        for key, processor in processors.items():
            if isinstance(processor, _DIRECT):
                routed[key] = Routed(processor, attend)
        network.set_attn_processor(routed)


def _trial_problem(
    name: str, *, dtype: torch.dtype, device: torch.device, trains: bool, masked: bool = False
) -> str:
    """Say why a back end cannot attend here, forward and if it ``trains`` backward; an empty text
    if it can.

    ``masked``: also with a mask [B, 1, 1, M] of booleans, as Qwen-Image and Z-Image have it. Some
    back ends refuse one. diffusers' xformers takes it for numbers to add (0.42), so that hidden
    tokens are seen: what it computes is looked at, too.
    """
    q, k, v = torch.randn(3, 1, 64, 2, 64, device=device).to(dtype).requires_grad_(trains).unbind()
    seen = torch.arange(64, device=device) < 48
    # a mean of the values that may be seen is not above the largest of them
    marked = torch.where(seen[:, None, None], v, LOUD) if masked else v
    mask = seen[None, None, None] if masked else None
    try:
        with quiet(), attention_backend(name), torch.set_grad_enabled(trains):
            out = dispatch_attention_fn(q, k, marked, attn_mask=mask)
            if trains:
                torch.autograd.grad(out.float().sum(), (q, k, v))
    except Exception as error:  # packages, kernels and torch raise every kind
        return first_line(error)
    heard = masked and not bool(out.abs().max() < LOUD / 10)
    return "it does not heed a mask: hidden tokens change what it computes" if heard else ""


class Routed:
    """An attention processor whose calls of torch's attention are computed another way."""

    def __init__(self, processor: Callable[..., Any], attend: Attend) -> None:
        self._processor, self._mode = processor, _Attention(attend)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Any:
        """Attend as the processor that is wrapped does."""
        more = () if temb is None else (temb,)  # SD3's processor knows no such argument
        with self._mode:
            return self._processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, *more
            )


class _Attention(TorchFunctionMode):
    """Torch's attention computed by a function of the same arguments; nothing else is touched."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        asked = function is scaled_dot_product_attention
        return (self.attend if asked else function)(*args, **(kwargs or {}))


def _by_back_end(name: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend by a back end of diffusers, which has heads after tokens."""
    q, k, v = (rows.transpose(1, 2) for rows in (query, key, value))
    out = dispatch_attention_fn(q, k, v, backend=AttentionBackendName(name), **options)
    return out.transpose(1, 2)


def _given(option: Any) -> bool:
    """Whether an option of attention asks for something: a mask, dropout, a scale, causality."""
    return isinstance(option, Tensor) or bool(option)


def _in_groups(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attend by `attend_in_groups` where sequences are short and nothing is masked or dropped, else
    as torch does."""
    if key.shape[-2] > SHORT or any(_given(option) for option in options.values()):
        return scaled_dot_product_attention(query, key, value, **options)
    return attend_in_groups(query, key, value)


def attend_in_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute softmax(q k' / sqrt(d)) v with the products written out, some samples at a time.

    For short sequences on a CPU in bfloat16, where torch's fused kernel is slow: the weights of a
    group, about 2 MB, stay in the cache, and are kept for the backward pass.

    Args:
        query: [B, H, N, d]. key, value: [B, H, M, d].

    Returns:
        [B, H, N, d], equal to scaled_dot_product_attention but for the rounding.
    """
    weights = query.shape[1] * query.shape[2] * key.shape[2]
    size = max(1, GROUP // weights)
    query = query * query.shape[-1] ** -0.5
    parts = []
    for q, k, v in zip(query.split(size), key.split(size), value.split(size), strict=True):
        parts.append((q @ k.transpose(-1, -2)).softmax(-1) @ v)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class OnePassRMSNorm(RMSNorm):  # type: ignore[misc]
    """x [..., D] -> x / sqrt(mean(x^2) + eps) * weight, in the dtype of x.

    **Differs:** diffusers widens, squares, averages, scales, narrows and weighs in passes of their
    own over x, rounds to a short dtype twice and keeps float32 copies for the backward pass.
    PyTorch's kernel for CUDA, there from 2.9 on, reads x once, computes in float32, rounds once and
    keeps x and a float32 number for each of its rows.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension; diffusers' own way where the weight has another dtype than
        x, whose result has that of the weight or is wider, and under an autocast that would widen
        both."""
        x, weight = hidden_states, self.weight
        if weight.dtype != x.dtype or _widens(x):
            own: Tensor = super().forward(x)
            return own
        # heads [B, H, L, D] cut from rows [B, L, H D]: as they lie, for the kernel copies what is
        # not contiguous; the result lies as x does
        if x.ndim == 4 and not x.is_contiguous():
            return F.rms_norm(x.transpose(1, 2), weight.shape, weight, self.eps).transpose(1, 2)
        return F.rms_norm(x, weight.shape, weight, self.eps)


def one_pass(network: Any) -> None:
    """Let the RMS norms of a diffusers network take one pass; those of `torch.nn` do so already."""
    for module in network.modules():
        plain = type(module) is RMSNorm and module.bias is None
        if plain and module.weight is not None and module.weight.ndim == 1:
            module.__class__ = OnePassRMSNorm


def _widens(x: Tensor) -> bool:
    """Tell whether CUDA's autocast would compute the norm in float32 and leave the result in it."""
    return x.dtype != torch.float32 and torch.is_autocast_enabled("cuda")


class _Ticket:
    """Lives as long as the graph of a call that wanted a gradient; ``done`` once that passed."""

    done = False


class GraphSteps:
    """Tell torch's CUDA graphs where a new call of the network begins.

    A graph computes in memory of its own, and the same memory again in the next call. Within a call
    the blocks read what the blocks before them computed, and the backward pass what the forward
    pass kept; torch must be told when all of this is over. It is at a call, unless a gradient still
    has to go back through an earlier one: the reference's velocity, say, is asked for between the
    two passes of the trained network's.
    """

    def __init__(self) -> None:
        self._open: list[weakref.ref[_Ticket]] = []

    def begin(self) -> None:
        """Begin a call: what earlier calls computed may be written over, unless a gradient
        waits."""
        tickets = (one() for one in self._open)
        waiting = [one for one in tickets if one is not None and not one.done]
        self._open = [weakref.ref(one) for one in waiting]
        if not waiting:
            torch.compiler.cudagraph_mark_step_begin()

    def watched(self, out: Tensor) -> Tensor:
        """Return the velocity [B, *] of a call that wants a gradient; until the gradient passed it,
        or nothing holds it any more, nothing is written over."""
        ticket = _Ticket()
        self._open.append(weakref.ref(ticket))
        found: Tensor = _Watched.apply(out, ticket)  # type: ignore[no-untyped-call]
        return found


class _Watched(torch.autograd.Function):
    """The identity, which notes that a gradient passed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, ticket: _Ticket) -> Tensor:
        """Keep the ticket as long as the graph is kept."""
        ctx.ticket = ticket
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on."""
        ctx.ticket.done = True
        return grads[0], None


def quantization(
    name: str, networks: tuple[str, ...], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return diffusers' settings that quantise the linear layers of the parts ``networks``; None
    for ``none``.

    ``nf4`` is QLoRA's 4-bit type (2305.14314) by bitsandbytes, ``int8`` rounds weights only, by
    torchao. **Differs:** bitsandbytes' own int8 also quantises activations, by what the rows of a
    batch have in common: a log-prob would depend on which samples are evaluated together. Raise
    ModelError if the package is missing, or the device is not one that it works on.
    """
    if name == "none":
        return None
    # what cannot work is said before the weights are read
    if name == "nf4" and device.type not in NF4_DEVICES:
        raise ModelError(
            f"runtime.quantize: 'nf4' needs a CUDA device, got {device}: diffusers loads "
            "bitsandbytes' weights"
            " nowhere else. 'int8' works here"
        )
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise ModelError(
            f"runtime.quantize: {name!r} needs the package {PACKAGES[name]}: {install('quant')}, "
            "or leave it at none"
        )
    # the networks only: VAE and text encoders stay as they are
    return PipelineQuantizationConfig(
        quant_mapping={part: _nf4(dtype) if name == "nf4" else _int8() for part in networks}
    )


def _nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def context_size(runtime: Runtime) -> int:
    """Return how many processes compute each sample together; 1 where this one is alone."""
    return 1 if world().alone else runtime.context_parallel


def share_context(network: Any, runtime: Runtime, device: torch.device) -> None:
    """Let processes compute each sample of a network together; its weights are whole in each.

    Each process' gradients are those of its tokens: their sum is the gradient. Raises ConfigError,
    ModelError.
    """
    # what was proven
    degree = context_size(runtime)
    where = f"runtime.context_parallel={degree}"
    if not isinstance(network, WanTransformer3DModel):
        kind = type(network).__name__
        raise ConfigError(f"{where}: is for Wan's videos, got a {kind}; leave it out")
    if runtime.compile:
        raise ConfigError(f"{where}: does not go with compile; leave one of them out")
    heads = int(network.config.num_attention_heads)
    if heads % degree:
        raise ModelError(f"{where}: expected a divisor of the network's {heads} heads")
    # diffusers' own
    config = ContextParallelConfig(ulysses_degree=degree, mesh=context_mesh(degree, device.type))
    try:
        with quiet(), _a_device():
            network.enable_parallelism(config=config)
    except ValueError as error:  # an attention back end that cannot
        raise ModelError(f"{where}: {error}") from error


@contextmanager
def _a_device() -> Iterator[None]:
    """Let diffusers divide by the number of accelerators where there is none."""
    count = torch.accelerator.device_count
    if count() == 0:
        torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count


@contextmanager
def quiet() -> Iterator[None]:
    """Keep diffusers and transformers from logging what flowrl says itself, or what nobody needs to
    know."""
    logs = (diffusers.utils.logging, transformers.utils.logging)
    before = (logs[0].get_verbosity(), logs[1].get_verbosity())
    try:
        for log in logs:
            log.set_verbosity_error()
        yield
    finally:
        for log, level in zip(logs, before, strict=True):
            log.set_verbosity(level)
