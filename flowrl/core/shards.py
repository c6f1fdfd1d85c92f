"""Tensors of which each process holds a share, in safetensors files and back; at no time does one
process hold a whole network.

Beside `processes.py` the only file that imports torch.distributed. Shares are written by
torch.distributed.checkpoint in its layout for safetensors: each process writes files of its own,
whose headers say where in the whole tensor a share begins. torch's default layout keeps its index
as a pickle, which flowrl never reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import RunError

PIECE = 2**31  # bytes of a file: it is on the host twice while it is written
ENDING = ".safetensors"


class Kind(NamedTuple):
    """Shape and dtype of a whole tensor in files."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def is_share(tensor: Tensor) -> bool:
    """Tell whether this process holds a share of a tensor, and others the rest."""
    if type(tensor) in (Tensor, torch.nn.Parameter):  # without an import that takes long
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def here(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, not copied."""
    return tensor.to_local() if is_share(tensor) else tensor  # type: ignore[attr-defined]


def room_for(kind: Kind, like: Tensor | None) -> Tensor:
    """Return memory for a tensor: for this process' share if `like` is one of the same shape, on
    its device; else for all of it, on the CPU."""
    if like is not None and is_share(like) and tuple(like.shape) == kind.shape:
        return torch.empty_like(like, dtype=kind.dtype, requires_grad=False)
    return torch.empty(kind.shape, dtype=kind.dtype)


def write_shares(
    folder: Path, name: str, tensors: Mapping[str, Tensor], rank: int, size: int
) -> list[Path]:
    """Write every process' shares of tensors into a folder that all of them see -> the files of
    this one, ``<name>-00001-of-00008.safetensors``. A tensor that is no share is written once.

    All processes must call it. Raises RunError in each if one of them cannot write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # tensors -> the file of each process that they belong into
    pieces, held = {}, 0
    for key, tensor in tensors.items():
        held += ceil(tensor.numel() / size) * tensor.element_size()
        pieces[key] = 1 + held // PIECE
    most = max(pieces.values())
    drafts = folder / f"{name}.parts"
    writer = HuggingFaceStorageWriter(
        str(drafts), fqn_to_index_mapping=pieces, save_distributed=True
    )
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # no Exception; the same in each process
        first = next(iter(error.failures))
        reason = error.failures[first][0]
        raise RunError(f"cannot write {folder}: process {first} of {size}: {reason}") from error
    # names that say what is in them
    files = []
    for number in range(1, most + 1):
        draft = drafts / f"shard-{rank + 1:05d}-model-{number:05d}-of-{most:05d}{ENDING}"
        if draft.exists():  # there is none where a process has nothing
            file = f"{name}-{rank * most + number:05d}-of-{size * most:05d}{ENDING}"
            files.append(draft.rename(folder / file))
    return files


def kinds(files: Sequence[Path]) -> dict[str, Kind]:
    """Return what tensors files hold, of which several may hold shares; only headers are read.

    Raises ValueError where shares of a tensor are missing; OSError, SafetensorError.
    """
    if not files:
        return {}
    found = {}
    for name, entry in _reader(files).read_metadata().state_dict_metadata.items():
        there = sum(prod(chunk.sizes) for chunk in entry.chunks)
        if there != prod(entry.size):
            raise ValueError(
                f"{name}: expected shares of {prod(entry.size)} numbers, got {there}: one of "
                f"{', '.join(file.name for file in files)} is not what was written"
            )
        found[name] = Kind(tuple(entry.size), entry.properties.dtype)
    return found


def read_into(targets: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    """Fill tensors, or this process' shares of them, from files of whole tensors or of shares: one
    tensor after the other, only the part that is wanted, in the target's dtype.

    Nothing is sent. Raises ValueError for a tensor that is not there or has another
    shape; OSError, SafetensorError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    if not targets:
        return
    # headers only: refuse names and shapes before anything is read
    there = kinds(files)
    for name, tensor in targets.items():
        if name not in there or there[name].shape != tuple(tensor.shape):
            got = f"of shape {[*there[name].shape]}" if name in there else "none"
            raise ValueError(f"expected a tensor {name} of shape {[*tensor.shape]}, got {got}")
    try:
        with warnings.catch_warnings():  # that this is one process, as is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # detached tensors share memory with the targets, so loading fills these
            held = {name: tensor.detach() for name, tensor in targets.items()}
            load(held, storage_reader=_reader(files), no_dist=True)
    except CheckpointException as error:
        # torch wraps the failures of all processes; here there is one process
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"{files[0].parent}: {reason}") from error


def _reader(files: Sequence[Path]) -> Any:
    """Return torch's reader of safetensors, which would take all files of a folder, for these."""
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Chosen(FileSystem):
        def ls(self, path: Any) -> list[str]:
            """Return the files."""
            return [str(file) for file in files]

    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = Chosen()
    return reader
