"""Attention back ends by the names that diffusers gives them, tried out before a network gets
one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    attention_backend,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import AttnProcessor2_0, JointAttnProcessor2_0
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flowrl.core.errors import ModelError
from flowrl.models.loading import first_line, quiet

NAMES = tuple(backend.value for backend in AttentionBackendName)
HUB = "_hub"  # ending of the names whose code is fetched from the Hugging Face hub
LOCAL = tuple(name for name in NAMES if not name.endswith(HUB))
# These call torch's attention themselves: set_attention_backend leaves them as they are, without a
# word.
_DIRECT = (AttnProcessor2_0, JointAttnProcessor2_0)  # of UNets and of SD3


def unknown_back_end(name: str) -> str:
    """Say what is wrong with a name that diffusers does not know or has no code for here; an empty
    text if nothing is."""
    if name in LOCAL:
        return ""
    if name in NAMES:
        return (
            f"{name!r} fetches code from the Hugging Face hub and runs it, which flowrl never "
            f"does; install the package and take one of {', '.join(LOCAL)}"
        )
    near = difflib.get_close_matches(name, LOCAL, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown back end {name!r}{hint} (diffusers knows {', '.join(LOCAL)})"


def set_attention(
    network: Any, name: str, *, dtype: torch.dtype, device: torch.device, trains: bool
) -> None:
    """Let a diffusers network attend by a back end. Raise ModelError, with those that work here, if
    it does not.

    **Differs:** diffusers' set_attention_backend also changes the default of the process, and
    changes nothing in SD3 and in UNets; here the default stays, and the attention of those networks
    is sent to the back end, too.
    """
    reason = problem(name, dtype=dtype, device=device, trains=trains)
    if reason:
        able = [
            other
            for other in LOCAL
            if not problem(other, dtype=dtype, device=device, trains=trains)
        ]
        raise ModelError(
            f"runtime.attention: {name!r} does not work here in "
            f"{str(dtype).removeprefix('torch.')} on {device}"
            f"{' with a gradient' if trains else ''}: {reason}. Available: {', '.join(able)}"
        )
    with quiet(), attention_backend():  # puts the process's default back
        network.set_attention_backend(name)
    processors = network.attn_processors
    if any(isinstance(processor, _DIRECT) for processor in processors.values()):
        routed = {
            key: Routed(p, name) if isinstance(p, _DIRECT) else p for key, p in processors.items()
        }
        network.set_attn_processor(routed)


def problem(name: str, *, dtype: torch.dtype, device: torch.device, trains: bool) -> str:
    """Say why a back end cannot attend here, forward and if it ``trains`` backward; an empty text
    if it can."""
    q, k, v = torch.randn(3, 1, 64, 2, 64, device=device).to(dtype).requires_grad_(trains).unbind()
    try:
        with quiet(), attention_backend(name), torch.set_grad_enabled(trains):
            out = dispatch_attention_fn(q, k, v)
            if trains:
                torch.autograd.grad(out.float().sum(), (q, k, v))
    except Exception as error:  # packages, kernels and torch raise every kind
        return first_line(error)
    return ""


class Routed:
    """An attention processor whose calls of torch's attention go to a back end of diffusers."""

    def __init__(self, processor: Callable[..., Any], name: str) -> None:
        self._processor, self._route = processor, _Route(AttentionBackendName(name))

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
        with self._route:
            return self._processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, *more
            )


class _Route(TorchFunctionMode):
    def __init__(self, backend: AttentionBackendName) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = (rows.transpose(1, 2) for rows in args)  # diffusers has heads after tokens
        return dispatch_attention_fn(q, k, v, backend=self.backend, **(kwargs or {})).transpose(
            1, 2
        )
