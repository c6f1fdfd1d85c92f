"""Small tensors that are read on the host in every network call: copied from the device once.

Which nodes a network call has and which sigma grid they were sampled on decide about random
streams, which live on the host. A copy of them in every call would make the host wait for the
device each time.
"""

from __future__ import annotations

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
