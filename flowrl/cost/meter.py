"""Run networks on the meta device, where tensors have shapes but no numbers, and note bytes and
floating-point work.

Counted is what PyTorch's eager mode asks its allocator for, tensor by tensor. Not counted: what
libraries allocate on their own (cuDNN's and cuBLAS' workspaces), the allocator's rounding and its
gaps, and compiled code, which fuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flowrl.core.pixels import round_8bit
from flowrl.models.adapter import decode_latents

# What autocast computes in the short dtype, and what CUDA's computes in float32 (the CPU's leaves
# it as it is); of the operations that the networks of the adapters use. Source: PyTorch's list,
# "Autocast Op Reference".
_SHORT: set[Any] = {
    *(F.linear, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul, Tensor.__matmul__),
    *(torch.bmm, torch.baddbmm),
}
_WIDE: set[Any] = {
    *(F.layer_norm, F.group_norm, F.rms_norm, Tensor.pow, Tensor.__pow__, torch.pow),
    *(torch.rsqrt, torch.exp, F.softmax, Tensor.softmax, Tensor.sum, torch.sum),
}

# The attention that the meter runs, under the formulas of the GPU's: PyTorch knows those of the CPU
# from 2.15 on only.
_ATEN = torch.ops.aten
_FORMULAS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}


class Meter(TorchDispatchMode):
    """Note the bytes of living tensors that were made inside, and the floating-point work of matrix
    products."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        """Count nothing of `held`: tensors from before, such as weights."""
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._living: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _made(func, args, kwargs or {})
        packet = func._overloadpacket
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def spike(self, size: int) -> None:
        """Note that `size` bytes more are taken, and given back at once."""
        self.peak = max(self.peak, self.now + size)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._living:
            self._living[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.spike(0)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._living.pop(key)


class _Layout(NamedTuple):
    """How a result is made again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    source: int | None  # place of the argument whose storage it shares; None: it has its own
    offset: int  # in that storage, from where the argument begins


# What an operation made of arguments of some shapes: the blocks of a network are alike, and what
# the meta device does in Python for an operation takes far longer than to make its result again.
# None: it has to run each time.
_known: dict[Any, tuple[type, list[_Layout]] | None] = {}
MOST_KNOWN = 20_000
_NEW: Any = object()


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on tensors without numbers, or make what it made of equal shapes before."""
    try:
        key = func, _key(args), _key(tuple(kwargs.items()))
        found = _known.get(key, _NEW)
    except TypeError:  # an argument that cannot be compared
        found, key = None, None
    if found is _NEW:
        out = func(*args, **kwargs)
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = _layouts(func, (args, kwargs), out)
        return out
    if found is None:
        return func(*args, **kwargs)
    kind, layouts = found
    inputs = _tensors(args, kwargs) if any(one.source is not None for one in layouts) else []
    results = []
    for one in layouts:
        if one.source is None:
            made = torch.empty_strided(one.size, one.stride, dtype=one.dtype, device="meta")
        else:
            source = inputs[one.source]
            made = source.as_strided(one.size, one.stride, source.storage_offset() + one.offset)
        results.append(made)
    return results[0] if kind is Tensor else kind(results)


def _key(value: Any) -> Any:
    """Return what of an argument decides the shapes of a result."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple([_key(one) for one in value])
    return type(value), value


def _tensors(*given: Any) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


def _layouts(func: Any, given: Any, out: Any) -> tuple[type, list[_Layout]] | None:
    """Return how to make the results of an operation again; None where it changes an argument,
    where its type hangs on more than shapes, or where results are no plain tensors."""
    results = [out] if isinstance(out, Tensor) else out
    whole = isinstance(results, list | tuple) and all(isinstance(one, Tensor) for one in results)
    if func._schema.is_mutable or not whole or not results:
        return None
    # a number beside whole ones is promoted by whether it was a tensor
    inputs = _tensors(given)
    plain = any(one.ndim == 0 and one.device.type != "meta" for one in inputs)
    if plain and not all(one.is_floating_point() for one in inputs):
        return None
    shared = [one.untyped_storage()._cdata for one in inputs]
    layouts = []
    for one in results:
        source, storage = None, one.untyped_storage()
        if storage._cdata in shared:
            source = shared.index(storage._cdata)
            offset = one.storage_offset() - inputs[source].storage_offset()
            same = one.dtype == inputs[source].dtype and not one.is_complex()
        else:
            again = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
            offset = one.storage_offset()
            same = again.untyped_storage().nbytes() == storage.nbytes() and offset == 0
        if one.device.type != "meta" or not same:
            return None
        layouts.append(_Layout(one.shape, one.stride(), one.dtype, source, int(offset)))
    own = {one.untyped_storage()._cdata for one in results} - {*shared}
    if len(own) < sum(one.source is None for one in layouts):  # results that share one of their own
        return None
    return Tensor if isinstance(out, Tensor) else type(out), layouts


class DeviceRules(TorchFunctionMode):
    """Make the meta device behave as a real one: attention without its matrix, CUDA's norms in one
    pass, and autocast, which it does not have."""

    def __init__(
        self,
        autocast: torch.dtype | None = None,
        *,
        device: str = "cuda",
        one_pass_norms: bool = False,
    ) -> None:
        """Compute in `autocast` as ``torch.autocast(device, autocast)`` would; None = as the
        tensors are. With `one_pass_norms` PyTorch's RMS norm is its kernel for CUDA, on CUDA."""
        super().__init__()
        self.one_pass_norms = one_pass_norms and device == "cuda"
        self.autocast, self.wide = autocast, _WIDE if device == "cuda" else set()
        self._casts: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attention = func is F.scaled_dot_product_attention
        if self.autocast is not None and (attention or func in _SHORT):
            args, kwargs = _mapped(self._shorten, args), _mapped(self._shorten, kwargs)
        elif self.autocast is not None and func in self.wide:
            args, kwargs = _mapped(_widen, args), _mapped(_widen, kwargs)
        if func is F.rms_norm and self.one_pass_norms:
            return _rms_norm(*args, **kwargs)
        if attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)

    def leave(self) -> None:
        """Forget the short copies of the weights, as autocast does when its block ends."""
        self._casts.clear()

    def _shorten(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dtype == self.autocast:
            return value
        # autocast keeps trained weights' copies only
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.autocast)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(self.autocast)
        return self._casts[id(value)]


class SavedTensors:
    """Bytes of the storages that autograd saved for the backward pass."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        """Count nothing of `held`: parameters, which are there anyway."""
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._found: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Return what was saved so far."""
        return sum(self._found.values())

    def note(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and hand it back."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held and storage._cdata not in self._found:
            self._found[storage._cdata] = storage.nbytes()
        return tensor


@contextmanager
def saved_for_backward(held: Iterable[Tensor]) -> Iterator[SavedTensors]:
    """Count what autograd saves inside, on any device: bytes of unique storages that are not those
    of `held`."""
    saved = SavedTensors(held)
    with saved_tensors_hooks(saved.note, _same):
        yield saved


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    if isinstance(values, dict):
        return {name: change(value) for name, value in values.items()}
    return tuple(map(change, values))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the kernel that keeps queries, keys, values and output, not the matrix
    [tokens, tokens].

    On a GPU the flash and the memory-efficient kernels keep the same; this one runs on the meta
    device and on CPUs.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[
        0
    ]
    return out


def _rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Normalise as PyTorch's kernel for CUDA does, ``_fused_rms_norm``; it takes one dtype only."""
    if weight is not None and weight.dtype != x.dtype:
        return F.rms_norm(x, normalized_shape, weight, eps)
    out: Tensor = _OnePassNorm.apply(x, weight, len(normalized_shape))
    return out


class _OnePassNorm(torch.autograd.Function):
    """Take and keep the memory of ``_fused_rms_norm``, without numbers: its result and a float32
    number for each row; for the backward pass x, the weight and these."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        out = torch.empty_like(x.contiguous())
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.ndim - dims], dtype=wide))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        # the kernel copies what is not contiguous
        whole, _ = x.contiguous(), grad.contiguous()
        back, of_weight = torch.empty_like(whole), None
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight)
        return back, of_weight, None


class MeteredVAE:
    """Stand in for a VAE: its memory of `peak` bytes per image was measured, and its images
    [3, H, W], or [3, T, H, W] of videos, have no numbers."""

    def __init__(self, meter: Meter, peak: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.meter, self.peak, self.shape, self.dtype = meter, peak, shape, dtype

    def decode(self, latents: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        self.meter.spike(self.peak * len(latents))
        return (torch.empty(len(latents), *self.shape, device="meta", dtype=self.dtype),)


def decode_videos(vae: MeteredVAE, x0: Tensor, batch: int) -> Tensor:
    """Decode latents [B, C, t, h, w] as Wan's adapter does -> [B, T, 3, H, W] float32."""
    processor = VideoProcessor(vae_scale_factor=8)
    videos = []
    for part in x0.split(batch):
        video = vae.decode(part.to(vae.dtype) / 2 + 1, return_dict=False)[0]
        videos.append(processor.postprocess_video(video, output_type="pt"))
    return torch.cat(videos).float()


def decode_rounded_images(vae: MeteredVAE, x0: Tensor, batch: int, scale: int) -> Tensor:
    """Decode latents [B, C, h, w] as adapters of images do, and round them to 8-bit steps -> [B,
    *vae.shape] float32. The latents are still held while the images are rounded."""
    latents = x0.to(vae.dtype) / 2 + 1  # any scale and shift
    processor = VaeImageProcessor(vae_scale_factor=scale)
    pipeline = SimpleNamespace(vae=vae, image_processor=processor)
    return round_8bit(decode_latents(pipeline, latents, batch=batch))
