"""What CUDA refuses and what its host waits for, by the operation's name and its arguments.

Sources: torch 2.14, ``aten/src/ATen/native/cuda``; an operation waits where
``torch.cuda.set_sync_debug_mode("error")`` would raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# the host needs a number, or how many rows there are; isin sorts by `unique`
WAITING = {"_local_scalar_dense", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
WAITING |= {"nonzero", "masked_select", "equal", "bincount", "isin"}
COPIES = {"_to_copy", "copy_", "_foreach_copy_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# beside pointwise ones, operations that read a number [] of the host
TAKES_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "where"}
# CPU alone: products of whole numbers, and what CUDA has no kernel for
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "dot", "mv", "addmv"}
ABSENT = {"histogram", "_histogramdd_from_bin_cts"}


def refuse(name: str, tags: Iterable[Any], here: Sequence[Tensor], away: Sequence[Tensor]) -> None:
    """Raise what CUDA would. here, away: the arguments on the device and on the host."""
    if name in ABSENT:
        raise NotImplementedError(f"CUDA has no kernel for aten::{name}")
    if name in PRODUCTS and not here[0].is_floating_point():
        raise NotImplementedError(f'"{name}_cuda" not implemented for {here[0].dtype}')
    if name in COPIES:
        return
    if name in INDEXING and name != "index" and any(t.dim() for t in away if not _whole(t)):
        raise RuntimeError(_mixed(name, away))
    if name in INDEXING:
        return
    numbers = torch.Tag.pointwise in tags or name in TAKES_NUMBERS or name.startswith("_foreach_")
    if any(not numbers or t.dim() for t in away):
        raise RuntimeError(_mixed(name, away))


def refuse_indices(name: str, own: Any, indices: Any) -> None:
    """Raise what torch would for a tensor of the host that is indexed by the device."""
    if name in INDEXING and own.device.type == "cpu":
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu): "
            f"{[tuple(rows.shape) for rows in indices if rows is not None]}"
        )


def refuse_generator(name: str, options: Mapping[str, Any]) -> None:
    """Raise what CUDA would for a generator of the host."""
    if options.get("generator") is not None:
        raise RuntimeError(
            f"{name}: expected a 'cuda' device type for generator but found "
            f"'{options['generator'].device.type}'"
        )


def refuse_collective(name: str, found: Iterable[Tensor]) -> None:
    """Raise what NCCL would for tensors of the host in a collective."""
    if any(rows.device.type == "cpu" for rows in found):
        raise RuntimeError(f"{name}: no backend type associated with device type cpu")


def waits(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Say why the host waits for the device in an operation on it; an empty text if it does not.
    Copies are judged by `copy_waits`."""
    if name in WAITING:
        return name
    if name == "repeat_interleave" and options.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name in INDEXING:
        return _index_waits(name, args)
    return ""


def copy_waits(name: str, host: bool, blocking: bool) -> str:
    """Say why a copy between host and device waits. host: it goes to the host.

    Raises RuntimeError for one to the host that does not wait: its numbers are not there when the
    next line reads them.
    """
    if host and not blocking:
        raise RuntimeError(f"{name}: non_blocking copy to the host, read before it has arrived")
    return f"{name} to the {'host' if host else 'device'}" if blocking else ""


def _index_waits(name: str, args: tuple[Any, ...]) -> str:
    masks = [rows for rows in args[1] if rows is not None and not _whole(rows)]
    one = len(masks) == 1 and sum(rows is not None for rows in args[1]) == 1
    # a number put in by one mask is a masked_fill
    if masks and not (name != "index" and one and args[2].numel() == 1):
        return f"{name} by a mask"
    if any(rows is not None and rows.device.type == "cpu" for rows in args[1]):
        return f"{name} by indices of the host, which are copied"
    return ""


def _whole(rows: Tensor) -> bool:
    return rows.dtype in (torch.int64, torch.int32)


def _mixed(name: str, away: Sequence[Tensor]) -> str:
    shapes = [list(t.shape) for t in away]
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        f"and cpu! ({name}, on the host: {shapes})"
    )
