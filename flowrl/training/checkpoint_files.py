"""The tensors of a checkpoint, read file by file and only when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.shards import is_share, kinds, read_into, room_for
from flowrl.training.optimizer_state import Tensors

ENDING = ".safetensors"
Like = Callable[[str, str], Tensor | None]
"""``like(file, name)``: the parameter that a tensor is shared out as, or None."""
Found = TypeVar("Found")
_SHARES = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")


class CheckpointTensors(Mapping[str, Tensors]):
    """Tensors by file, {"current": {name: tensor}, ...}; what one holds is read anew each time."""

    def __init__(self, folder: Path, names: Sequence[str], like: Like | None = None) -> None:
        self.folder, self._like = folder, like
        self._files: dict[str, list[Path]] = {}
        for name in names:
            found = _SHARES.fullmatch(name)
            key = found[1] if found else name.removesuffix(ENDING)
            self._files.setdefault(key, []).append(folder / name)

    def __getitem__(self, name: str) -> Tensors:
        """Read a file, or all of several files with shares. Raises CheckpointError."""
        files = self._files[name]
        if not self._in_shares(name) and self._like is None:
            return self._read(lambda: load_file(files[0]))
        targets = {}
        for key, kind in self._read(lambda: kinds(files)).items():
            targets[key] = room_for(kind, self._like(name, key) if self._like else None)
        self._read(lambda: read_into(targets, files))
        return targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def pop(self, name: str) -> Tensors:
        """Read a file and forget it. Raises CheckpointError, and KeyError where there is none."""
        found = self[name]
        self.drop(name)
        return found

    def drop(self, name: str) -> None:
        """Forget a file unread."""
        del self._files[name]

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a file's tensors; only headers are read. Raises CheckpointError."""
        files = self._files[name]
        if self._in_shares(name):
            return {key: kind.shape for key, kind in self._read(lambda: kinds(files)).items()}
        return self._read(lambda: _shapes(files[0]))

    def read_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, or this process' shares of them, from a file of this name, one after the
        other. Raises CheckpointError."""
        files = self._files[name]
        shared = self._in_shares(name) or any(map(is_share, targets.values()))
        work = read_into if shared else _copy_into
        self._read(lambda: work(targets, files))

    def _in_shares(self, name: str) -> bool:
        return _SHARES.fullmatch(self._files[name][0].name) is not None

    def _read(self, work: Callable[[], Found]) -> Found:
        """Read; what cannot be is one error."""
        try:
            return work()
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: cannot be read although its manifest fits: {error}"
            ) from error


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="pt") as tensors:
        names = tensors.keys()
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def _copy_into(targets: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    with safe_open(files[0], framework="pt") as tensors, torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors.get_tensor(name))
