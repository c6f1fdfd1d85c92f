"""One random LoRA of an adapter in the layouts of several programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.models.files.lora_names import find_place
from flowrl.runs.export.export import TrainedPart, fuse, write_kohya, write_lora, write_peft

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


def added(model: Any) -> dict[str, Tensor]:
    """Return what each adapter of a model adds to its weight, as peft computes it."""
    found: dict[str, Tensor] = {}
    for name, module in model.network.named_modules():
        if isinstance(module, BaseTunerLayer):
            found[name] = module.get_delta_weight("default").detach()
    return found


def _bare(trained: TrainedPart) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, layer in trained.layers.items():
        found |= {name + DOWN: layer.down, name + UP: layer.up}
        found[f"{name}.alpha"] = torch.tensor(float(trained.lora["lora_alpha"]))
    return found


def _saved(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "mine.safetensors")
    return folder / "mine.safetensors"


def diffusers_layout(trained: TrainedPart, folder: Path) -> Path:
    """As `load_lora_weights` reads it: alpha in the metadata."""
    write_lora(trained, folder)
    return folder / "pytorch_lora_weights.safetensors"


def peft_layout(trained: TrainedPart, folder: Path) -> Path:
    """As peft and flow_grpo save it: alpha in the file beside it."""
    folder.mkdir(parents=True)
    write_peft(trained, folder)
    return folder


def kohya_layout(trained: TrainedPart, folder: Path) -> Path:
    """As sd-scripts save it: names of the reference code, layers held as one."""
    folder.mkdir(parents=True)
    write_kohya(trained, folder)
    (file,) = folder.glob("*.safetensors")
    return file


def prefixed_layout(prefix: str, trained: TrainedPart, folder: Path) -> Path:
    """As many trainers save it: diffusers' names, alpha beside each layer."""
    return _saved({prefix + key: value for key, value in _bare(trained).items()}, folder)


def onetrainer_layout(trained: TrainedPart, folder: Path) -> Path:
    """As OneTrainer saves it: diffusers' names with `_`, kohya's endings."""
    start = "lora_unet_" if trained.network == "unet" else "lora_transformer_"
    found = {}
    for key, value in _bare(trained).items():
        stem, ending = key.rsplit(".lora_", 1) if ".lora_" in key else key.rsplit(".", 1)
        ending = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}.get(ending, ending)
        found[f"{start}{stem.replace('.', '_')}.{ending}"] = value
    return _saved(found, folder)


def comfy_layout(trained: TrainedPart, folder: Path) -> Path:
    """As ComfyUI's own models have it: names of the reference code with dots, one matrix A for
    layers that are held as one."""
    network, found = trained.module(), dict[str, Tensor]()
    for name in trained.layers:
        place = find_place(name, type(network).__name__, network.config)
        layers, rows = trained.layers, trained.module
        parts = [layers.get(part) or int(rows(part).out_features) for part in place.parts]
        down, up = fuse(parts)
        up = torch.cat(up.chunk(2)[::-1]) if place.swapped else up
        key = f"diffusion_model.{place.key}"
        found |= {key + DOWN: down, key + UP: up}
        found[f"{key}.alpha"] = torch.tensor(trained.scale * len(down))
    return _saved(found, folder)


def old_layout(trained: TrainedPart, folder: Path) -> Path:
    """As diffusers saved it in 2023, with alphas beside."""
    found: dict[str, Tensor] = {}
    for name, layer in trained.layers.items():
        key = f"{trained.network}.{name}"
        found |= {f"{key}.lora.down.weight": layer.down, f"{key}.lora.up.weight": layer.up}
        found[f"{key}.alpha"] = torch.tensor(float(trained.lora["lora_alpha"]))
    return _saved(found, folder)


Layout = Callable[[TrainedPart, Path], Path]
LAYOUTS: dict[str, Layout] = {
    "diffusers": diffusers_layout,
    "peft": peft_layout,
    "kohya": kohya_layout,
    "comfy": comfy_layout,
    "onetrainer": onetrainer_layout,
    "old": old_layout,
    "bare": partial(prefixed_layout, ""),
    "diffusion_model": partial(prefixed_layout, "diffusion_model."),
    "base_model": partial(prefixed_layout, "base_model.model."),
}


def changed(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Write a file beside another, without its metadata, its tensors changed in place."""
    tensors = load_file(file)
    change(tensors)
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, file.with_name("changed.safetensors"))
    return file.with_name("changed.safetensors")
