"""Merge a LoRA of another program into the folder of its base model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.core.errors import ModelError, RunError
from flowrl.core.files import read_json, replacing
from flowrl.models.files.loading import hollow_network, locate
from flowrl.models.files.lora_read import Update, read_lora
from flowrl.runs.export.export import INDEX, NETWORKS, SECOND, Change, write_pipeline


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
    entries = {name: index.get(name) for name in (*NETWORKS, SECOND)}
    parts = [name for name, entry in entries.items() if isinstance(entry, list) and entry[1:]]
    parts = [name for name in parts if isinstance(index[name][1], str) and index[name][1]]
    if not parts:
        raise ModelError(
            f"{folder / INDEX}: expected one of {', '.join((*NETWORKS, SECOND))} in it"
        )
    networks = {}
    for name in parts:
        prefix = f"{name}." if len(parts) > 1 else ""
        networks[prefix] = hollow_network(folder / name, index[name][1], torch.float32)
    # what the file adds to each of their tensors
    changes: dict[str, dict[str, Change]] = {name: {} for name in parts}
    for layer, update in read_lora(Path(lora), networks).updates.items():
        part = next((name for name in parts if layer.startswith(f"{name}.")), parts[0])
        name = layer.removeprefix(f"{part}.") if len(parts) > 1 else layer
        changes[part][f"{name}.weight"] = partial(_moved, update)
    with replacing(target) as draft:
        draft.mkdir()
        write_pipeline(folder, draft, changes=changes)


def _moved(update: Update, stored: Tensor) -> Tensor:
    """Return a stored weight with an update added."""
    return stored.float() + (update.scale * update.up @ update.down).reshape(stored.shape)
