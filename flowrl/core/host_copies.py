"""What the host reads of tensors on a device, with as few waits for the device as can be.

`on_host` copies a small tensor once. Which nodes a network call has and which sigma grid they were
sampled on decide about random streams, which live on the host, so these tensors are read in every
call.

`refuse_if` is a check of values that only the device knows. Read where it is made, each would let
the host wait; inside `checked_later` all are read at once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# for each tensor of a device that is still in use: its copy, and its version when it was copied
_COPIES = WeakTensorKeyDictionary()


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor as it is on the CPU. The host waits at the first time only, unless the tensor
    was changed since then. The copy is shared: do not change it."""
    if tensor.device.type == "cpu":
        return tensor
    copy, version = _COPIES.get(tensor, (None, -1))
    if copy is None or version != tensor._version:
        copy = tensor.cpu()
        remember(tensor, copy)
    return copy


def remember(tensor: Tensor, copy: Tensor) -> Tensor:
    """Say that a tensor is on the host already, as `copy` -> the tensor."""
    if tensor.device.type != "cpu":
        _COPIES[tensor] = (copy, tensor._version)
    return tensor


def repeated(nodes: Tensor, times: int) -> Tensor:
    """Repeat each of nodes [N] -> [N * times], known on the host where those are."""
    rows = nodes.repeat_interleave(times)
    if nodes in _COPIES:
        remember(rows, on_host(nodes).repeat_interleave(times))
    return rows


Waiting = list[tuple[Tensor, Callable[[], Exception]]]
_WAITING: ContextVar[Waiting | None] = ContextVar("waiting", default=None)


def refuse_if(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if `wrong` [] is true: at once, or at the end of `checked_later`."""
    waiting = _WAITING.get()
    if waiting is not None:
        waiting.append((wrong.detach(), error))
    elif bool(wrong):
        raise error()


@contextmanager
def checked_later() -> Iterator[None]:
    """Put off what `refuse_if` is asked inside -> at the end the first error is raised. After
    another exception nothing is checked."""
    waiting: Waiting = []
    token = _WAITING.set(waiting)
    try:
        yield
    finally:
        _WAITING.reset(token)
    if waiting:
        flags = torch.stack([wrong for wrong, _ in waiting]).tolist()
        for (_, error), flag in zip(waiting, flags, strict=True):
            if flag:
                raise error()
