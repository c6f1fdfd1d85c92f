"""Attention back ends by the names that diffusers gives them, tried out before a network gets
one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel, ZImageTransformer2DModel
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flowrl.core.errors import ModelError, near
from flowrl.models.loading import first_line, quiet

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


def avoid_cudnn(name: str, *, device: torch.device, trains: bool) -> None:
    """Let torch's attention, which picks a kernel by itself, not pick cuDNN's where it is trained
    on CUDA; for the whole process, unless `name` is cuDNN's.

    From PyTorch 2.11 on it is the first choice on an H100 or H200. Its backward pass fails there
    for FLUX (seen on an H200, docs/memory.md), and has gradients that are no numbers under a mask
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
    tried = partial(problem, dtype=dtype, device=device, trains=trains)
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


def problem(
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

    On a CPU in bfloat16 forward and backward together take a quarter of the time of torch's fused
    kernel (142 tokens, `assets/results/attention.json`). The weights of a group, about
    2 MB, stay in the cache; they are kept for the backward pass, so it is for short sequences.

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
