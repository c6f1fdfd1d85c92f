"""Networks without weights, which each of several processes fills with its share: none ever holds a
whole one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.processes import shared_as
from flowrl.core.shards import read_into

BASE = ".base_layer."  # under which peft keeps a layer that has an adapter


def hollow_network(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """Make a network of diffusers from its settings, its parameters on the meta device in the
    dtypes that diffusers would read them in. What it computes by itself, such as frequencies, is
    there."""
    network_class = getattr(diffusers, kind)
    with no_init_weights(), init_empty_weights():
        network = network_class.from_config(network_class.load_config(folder))
    kept = network_class._keep_in_fp32_modules or ()
    stored = network.state_dict()
    for module_name, module in network.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            whole_name = f"{module_name}.{name}".lstrip(".")
            if whole_name not in stored or not tensor.is_floating_point():
                continue
            wide = any(part in whole_name.split(".") for part in kept)
            tensor.data = tensor.data.to(torch.float32 if wide else dtype)
    return network


def fill(
    network: Any,
    folders: Mapping[str, Path],
    first: Iterable[tuple[str, Tensor]],
    *,
    device: torch.device,
) -> None:
    """Give a hollow network, which may be shared out by now, its weights on the device. Each
    process reads its share of a tensor, one tensor after the other.

    ``folders`` {prefix of parameters: folder of a part}; ``first`` has the parameters that are in
    no file, whole. Raise ModelError for a file that cannot be read.
    """
    # what was computed outlives the move
    computed = {name: buffer for name, buffer in network.named_buffers() if not buffer.is_meta}
    network.to_empty(device=device)
    for name, buffer in network.named_buffers():
        if name in computed:
            buffer.copy_(computed[name])
    # what is in no file
    there = network.state_dict()
    for name, start in first:
        tensor = there.pop(name)
        tensor.copy_(shared_as(start, tensor))
    # the weights
    for prefix, folder in folders.items():
        wanted = {}
        for name, tensor in there.items():
            if name.startswith(prefix):
                wanted[name.removeprefix(prefix).replace(BASE, ".")] = tensor
        try:
            read_into(wanted, weight_files(folder))
        except (OSError, SafetensorError, ValueError) as error:
            raise ModelError(f"{folder}: cannot be read: {error}; copy the files again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that diffusers reads of a part. Raises ModelError."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [folder / SAFETENSORS_WEIGHTS_NAME]
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weights: {error}; copy it again") from error
    return [folder / name for name in sorted(set(names))]
