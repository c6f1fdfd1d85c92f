"""Write a diffusers pipeline folder anew with other weights in one of its networks, file by
file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.errors import ModelError

INDEX = "model_index.json"
# Variants such as model.fp16.safetensors, and weights in other formats, stay behind.
_COPIED = re.compile(
    r"[\w-]+\.(json|txt|model|jinja)|(diffusion_pytorch_model|model)(-\d+-of-\d+)?\.safetensors"
)
_SHARDS = re.compile(r"(diffusion_pytorch_model|model)\.safetensors\.index\.json")

Change = Callable[[Tensor], Tensor]
"""``change(stored) -> new``, of a tensor's shape, in float32."""


def write_pipeline(
    base: Path,
    out: Path,
    *,
    changes: dict[str, dict[str, Change]],
    dtype: torch.dtype | None = None,
) -> None:
    """Write the pipeline of the folder ``base`` into ``out`` with ``changes`` of tensors, by the
    name of the part and their own.

    All tensors are stored in ``dtype``; with None the changed ones in float32 and the others as
    they are, so that no number is rounded. A part whose folder is missing becomes null in the
    index. Licence files come along. Raise ModelError if a tensor to change is not there, or stored
    in whole numbers.
    """
    # part by part
    index = json.loads((base / INDEX).read_text(encoding="utf-8"))
    missing = {(part, name) for part, tensors in changes.items() for name in tensors}
    total = len(missing)
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[0] is None:
            continue
        if not (base / name).is_dir():
            index[name] = [None, None]
            continue
        done = _write_part(base / name, out / name, changes.get(name, {}), dtype)
        missing -= {(name, tensor) for tensor in done}
    # all of what was trained has to be in them
    if missing:
        part, name = min(missing)
        raise ModelError(
            f"{base / part}: {len(missing)} of {total} trained tensors are not in its "
            f"files, such as {name}: this is another model than the one that was trained"
        )
    # what holds them together
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in base.glob("LICENSE*"):
        shutil.copyfile(file, out / file.name)


def _write_part(
    source: Path, out: Path, changes: dict[str, Change], dtype: torch.dtype | None
) -> set[str]:
    """Write one part's folder -> the names of the tensors that were changed."""
    out.mkdir()
    found: set[str] = set()
    for file in sorted(source.iterdir()):
        if not (_COPIED.fullmatch(file.name) or _SHARDS.fullmatch(file.name)):
            continue
        if file.suffix == ".safetensors" and (changes or dtype is not None):
            found |= _write_tensors(file, out / file.name, changes, dtype)
        else:
            shutil.copyfile(file, out / file.name)
    for shards in out.glob("*.safetensors.index.json"):
        _set_size(shards, out.glob("*.safetensors"))
    return found


def _write_tensors(
    file: Path, out: Path, changes: dict[str, Change], dtype: torch.dtype | None
) -> set[str]:
    # one file at a time, so that memory holds a shard and not the network
    tensors: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        about = stored.metadata()
        for name in stored.keys():  # noqa: SIM118 - this is no dict
            value = stored.get_tensor(name)
            if name in changes:
                # packed integers of 4 or 8 bits cannot take an addition
                if not value.is_floating_point():
                    raise ModelError(
                        f"{file}: {name} is quantised; merge into the same model in 16 or 32 bits "
                        "instead"
                    )
                value = changes[name](value)
            tensors[name] = (
                value.to(dtype) if dtype is not None and value.is_floating_point() else value
            )
    save_file(tensors, out, metadata=about)
    return changes.keys() & tensors.keys()


def _set_size(index: Path, files: Iterable[Path]) -> None:
    """Correct the number of bytes that the index of a network in several files tells."""
    shards = json.loads(index.read_text(encoding="utf-8"))
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as stored:
            total += sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    shards.setdefault("metadata", {})["total_size"] = total
    index.write_text(json.dumps(shards, indent=2) + "\n", encoding="utf-8")
