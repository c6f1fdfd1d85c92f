"""Write a whole pipeline from the files of its base model: with what a run trained, or with a LoRA
of another program in it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.devices import check_wide, kinds_of
from flowrl.core.errors import ModelError, RunError
from flowrl.core.files import read_json, replacing
from flowrl.models.files.loading import hollow_network, locate
from flowrl.models.files.lora_read import Update, read_lora
from flowrl.models.files.weights import weight_files

NETWORKS = ("transformer", "unet")  # the part of a pipeline that is trained
SECOND = "transformer_2"  # and another expert
INDEX = "model_index.json"
# beside the weights: variants such as model.fp16.safetensors stay behind where there are others
_COPIED = re.compile(r"[\w-]+\.(json|txt|model|jinja)")
_SHARDS = re.compile(r"(diffusion_pytorch_model|model)\.safetensors\.index\.(\w+\.)?json")

Change = Callable[[Tensor], Tensor]
"""``change(stored) -> new``, of a tensor's shape, in float32."""


def merge_lora(base: str, lora: str, out: str) -> None:
    """Write the pipeline of the folder `base` with a LoRA file in it to the new folder `out`.

    The file may be in any layout that `train.start` takes; a layer's weight becomes ``W + alpha / r
    B A``, added up in float32. Raises ModelError for a base that is no folder of a pipeline or a
    file that does not fit whole, RunError where `out` is there already.
    """
    # the networks, by their settings alone
    folder, target = locate(base), Path(out).absolute()
    if not isinstance(folder, Path) or not (folder / INDEX).is_file():
        raise ModelError(f"{base}: expected the folder of a diffusers pipeline, with a {INDEX}")
    if target.exists():
        raise RunError(f"{target} is there already: name another folder")
    index = read_json(folder / INDEX, dict[str, Any], error=ModelError)
    parts = []
    for name in (*NETWORKS, SECOND):
        entry = index.get(name)
        if isinstance(entry, list) and entry[1:] and entry[1] and isinstance(entry[1], str):
            parts.append(name)
    if not parts:
        raise ModelError(
            f"{folder / INDEX}: expected one of {', '.join((*NETWORKS, SECOND))} in it"
        )
    networks = {}
    for name in parts:
        prefix = ""
        if len(parts) > 1:
            prefix = f"{name}."
        networks[prefix] = hollow_network(folder / name, index[name][1], torch.float32)
    # what the file adds to each of their tensors
    changes: dict[str, dict[str, Change]] = {name: {} for name in parts}
    for layer, update in read_lora(Path(lora), networks).updates.items():
        part, name = parts[0], layer
        if len(parts) > 1:
            part, _, name = layer.partition(".")
        changes[part][f"{name}.weight"] = partial(_moved, update)
    with replacing(target) as draft:
        draft.mkdir()
        write_pipeline(folder, draft, changes=changes)


def _moved(update: Update, stored: Tensor) -> Tensor:
    """Return a stored weight with an update added."""
    return stored.float() + (update.scale * update.up @ update.down).reshape(stored.shape)


def write_pipeline(
    base: Path,
    out: Path,
    *,
    changes: dict[str, dict[str, Change]],
    dtype: torch.dtype | None = None,
    about: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> None:
    """Write the pipeline of the folder ``base`` into ``out`` with ``changes`` of tensors, by the
    name of the part and their own; ``about`` is metadata of changed files by part.

    All tensors are stored in ``dtype``; with None the changed ones in float32 and the others as
    they are, so that no number is rounded. A part whose folder is missing becomes null in the
    index. Licence files come along. Raise ModelError if a tensor to change is not there, or stored
    in whole numbers, or if a part's name is no name of a folder.
    """
    # part by part; a name that leads elsewhere would be read, and written, there
    index = read_json(base / INDEX, dict[str, Any], error=ModelError)
    strange = [name for name in index if not re.fullmatch(r"\w+", name)]
    if strange:
        raise ModelError(
            f"{base / INDEX}: expected names of letters, digits and _, got {strange[0]!r}"
        )
    missing = {(part, name) for part, tensors in changes.items() for name in tensors}
    total = len(missing)
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[:1] in ([], [None]):
            continue
        if not (base / name).is_dir():
            index[name] = [None, None]
            continue
        some, told = changes.get(name, {}), about.get(name, {})
        done = _write_part(base / name, out / name, some, dtype, told)
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
    source: Path,
    out: Path,
    changes: dict[str, Change],
    dtype: torch.dtype | None,
    about: Mapping[str, str],
) -> set[str]:
    """Write one part's folder -> the names of the tensors that were changed. Of a part with a
    variant alone, the files get the names of one without."""
    out.mkdir()
    found: set[str] = set()
    files, middle = list[Path](), ""
    if any(source.glob("*.safetensors")):
        files, variant = weight_files(source)
        if variant:
            middle = f".{variant}"
    for file in sorted(source.iterdir()):
        target = out / file.name.replace(middle, "", 1)
        if file in files and (changes or dtype is not None):
            found |= _write_tensors(file, target, changes, dtype, about)
        elif file in files or _COPIED.fullmatch(file.name):
            shutil.copyfile(file, target)
        elif len(files) > 1 and _SHARDS.fullmatch(file.name) and middle in file.name:
            target.write_text(file.read_text(encoding="utf-8").replace(middle, ""))
    for shards in out.glob("*.safetensors.index.json"):
        _set_size(shards, out.glob("*.safetensors"))
    return found


def _write_tensors(
    file: Path,
    out: Path,
    changes: dict[str, Change],
    dtype: torch.dtype | None,
    more: Mapping[str, str],
) -> set[str]:
    # one file at a time, so that memory holds a shard and not the network
    tensors: dict[str, Tensor] = {}
    with safe_open(file, framework="pt") as stored:
        about = {**(stored.metadata() or {"format": "pt"}), **more}
        for name in stored.keys():  # noqa: SIM118 - this is no dict
            value = stored.get_tensor(name)
            if name in changes:
                check_wide(kinds_of({name: value}), file)  # packed numbers cannot take an addition
                value = changes[name](value)
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            tensors[name] = value
    save_sorted(tensors, out, metadata=about)
    return changes.keys() & tensors.keys()


def _set_size(index: Path, files: Iterable[Path]) -> None:
    """Correct the number of bytes that the index of a network in several files tells."""
    shards = read_json(index, dict[str, Any], error=ModelError)
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as stored:
            total += sum(stored.get_tensor(name).nbytes for name in stored.keys())  # noqa: SIM118
    shards.setdefault("metadata", {})["total_size"] = total
    index.write_text(json.dumps(shards, indent=2) + "\n", encoding="utf-8")


def save_sorted(tensors: Mapping[str, Tensor], file: Path, *, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata is in the order of its keys, so that two files of the
    same content are the same bytes; the library takes any order."""
    save_file(dict(tensors), file, metadata=dict(metadata))
    with file.open("r+b") as stored:
        length = int.from_bytes(stored.read(8), "little")
        header = json.loads(stored.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            stored.seek(8)
            stored.write(text.ljust(length))
