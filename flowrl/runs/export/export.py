"""Write what a run trained as files for other programs, with a model card: one folder, ready for a
hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.devices import DTYPES
from flowrl.core.errors import ConfigError, ModelError, RunError
from flowrl.core.files import replacing
from flowrl.core.types import FlowModel
from flowrl.runs.best import Which
from flowrl.runs.export.card import base_name, write_card
from flowrl.runs.export.kohya import Layer, kohya_weights
from flowrl.runs.export.merged import Change, write_pipeline
from flowrl.runs.export.usage import LORA_FILE, CardFacts
from flowrl.runs.open import OpenedRun, load_run, run_of

NETWORKS = ("transformer", "unet")  # the part of a pipeline that is trained
PEFT_FILE = "adapter_model.safetensors"  # the name that peft looks for
ADAPTER = "default"  # the name that peft gives the adapter


@runtime_checkable
class PipelineModel(FlowModel, Protocol):
    """A FlowModel around a diffusers pipeline."""

    def pipeline(self) -> Any:
        """Return the pipeline with the current weights."""


class TrainedPart(NamedTuple):
    """What was trained, apart from the run."""

    pipeline: Any
    network: str  # name of the trained part
    weights: dict[str, Tensor]  # of full tuning, by name in the network; empty with LoRA
    layers: dict[str, Layer]  # of LoRA, by name of the adapted layer; empty without
    lora: dict[str, Any]  # r, lora_alpha, target_modules; empty without
    base: str  # the hub id of the base model, "" if it was a local folder
    name: str  # of the run
    dtype: torch.dtype | None

    @property
    def scale(self) -> float:
        """Return what the product of an adapter's matrices is multiplied with."""
        return float(self.lora["lora_alpha"]) / int(self.lora["r"])

    def module(self, name: str = "") -> Any:
        """Return the trained network, or a layer of it."""
        return getattr(self.pipeline, self.network).get_submodule(name)


def export(
    path: str | Path,
    out: str | Path,
    *,
    formats: Sequence[str] = (),
    weights: str | None = None,
    iteration: Which = None,
    dtype: str = "auto",
    base_model: str = "",
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> list[str]:
    """Write the weights of the run or checkpoint `path` into the folder `out` -> the names of the
    files there.

    `formats` are of `FORMATS`: lora, peft and kohya for a run that trained LoRA, merged for any; by
    default lora, or merged for a run that trained without LoRA. `weights` is ema or current, by
    default what the run's evaluations take. `dtype` ``auto`` keeps every number as it was trained.
    `base_model` is the hub id of the base model for card and adapters, where the run used a local
    folder. The folder is there whole or not at all. Raises ConfigError for a format that does not
    fit, RunError if `out` holds something or cannot be written, ModelError and CheckpointError as
    `load_run` does.
    """
    # what can be refused before gigabytes are read
    out = Path(out).absolute()
    _check_names(formats, dtype, weights)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            f"{out} holds something already: name another folder with --out, or empty this one"
        )
    # the run, and what it trained
    loaded = load_run(
        path, weights=weights, iteration=iteration, overrides=overrides, plugins=plugins
    )
    trained = trained_part(loaded.model, name=loaded.config.name, dtype=DTYPES.get(dtype))
    trained = trained._replace(base=base_model or base_name(loaded.config))
    chosen = _choose(formats, trained)
    # the files
    with replacing(out) as folder:
        folder.mkdir()
        for name in chosen:
            FORMATS[name](trained, folder)
        write_card(_facts(Path(path), loaded, trained, weights, chosen, out.name), folder)
        return sorted(
            file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
        )


def trained_part(
    model: Any, *, name: str = "model", dtype: torch.dtype | None = None
) -> TrainedPart:
    """Find what is trained in a model around a diffusers pipeline. Raise ModelError if there is
    none, or nothing is."""
    if not isinstance(model, PipelineModel):
        raise ModelError(
            f"export: expected a model around a diffusers pipeline, got a {type(model).__name__}; "
            "its weights are in the checkpoint's safetensors files"
        )
    # the trained network
    pipeline, params = model.pipeline(), model.trainable()
    network = next((part for part in NETWORKS if part in pipeline.components), None)
    if network is None or not params:
        raise ModelError(
            "export: there is nothing to export, the model has no trained weights (tune: none)"
        )
    own = getattr(pipeline, network)
    if getattr(model, "network", own) is not own:
        raise ModelError(
            "export: a model of two networks, as Wan 2.2, is not exported yet; its weights are in "
            "the checkpoint's safetensors files, under the names transformer and transformer_2"
        )
    values = {key: value.detach().cpu() for key, value in params.items()}
    if not any(".lora_A." in key for key in values):
        return TrainedPart(pipeline, network, values, {}, {}, "", name, dtype)
    # with LoRA
    config = getattr(pipeline, network).peft_config[ADAPTER]
    lora = {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(config.target_modules),  # a set, in any order
    }
    return TrainedPart(pipeline, network, {}, _layers(values), lora, "", name, dtype)


def write_lora(trained: TrainedPart, folder: Path) -> None:
    """Write the file that ``load_lora_weights`` of the pipeline reads, with rank and alpha in its
    metadata."""
    options = {
        f"{trained.network}_lora_layers": _peft_weights(trained),
        f"{trained.network}_lora_adapter_metadata": trained.lora,
    }
    type(trained.pipeline).save_lora_weights(folder, weight_name=LORA_FILE, **options)


def write_peft(trained: TrainedPart, folder: Path) -> None:
    """Write the files that ``peft.PeftModel.from_pretrained`` reads."""
    from peft import LoraConfig

    config = LoraConfig(
        **trained.lora, base_model_name_or_path=trained.base or None, inference_mode=True
    )
    config.target_modules = trained.lora[
        "target_modules"
    ]  # peft made a set of it, which has another order each time
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{key}": value for key, value in _peft_weights(trained).items()}
    save_file(tensors, folder / PEFT_FILE, metadata={"format": "pt"})


def write_kohya(trained: TrainedPart, folder: Path) -> None:
    """Write one file with the keys of kohya's sd-scripts and ComfyUI."""
    network = trained.module()
    tensors = kohya_weights(
        trained.layers,
        network=type(network).__name__,
        config=network.config,
        scale=trained.scale,
        rows=lambda name: int(trained.module(name).out_features),
    )
    save_file(
        _cast(tensors, trained.dtype), folder / _kohya_file(trained), metadata={"format": "pt"}
    )


def write_merged(trained: TrainedPart, folder: Path) -> None:
    """Write a whole pipeline, from the base model's own files and the trained weights, added up in
    float32."""

    def moved(layer: Layer, stored: Tensor) -> Tensor:
        return stored.float() + trained.scale * (layer.up.float() @ layer.down.float())

    def replaced(value: Tensor, stored: Tensor) -> Tensor:
        return value.float()

    changes: dict[str, Change] = {
        key: partial(replaced, value) for key, value in trained.weights.items()
    }
    changes |= {f"{name}.weight": partial(moved, layer) for name, layer in trained.layers.items()}
    base = Path(trained.pipeline.name_or_path)
    write_pipeline(base, folder, network=trained.network, changes=changes, dtype=trained.dtype)


FORMATS: dict[str, Callable[[TrainedPart, Path], None]] = {
    "lora": write_lora,
    "peft": write_peft,
    "kohya": write_kohya,
    "merged": write_merged,
}


def _facts(
    path: Path,
    loaded: OpenedRun,
    trained: TrainedPart,
    weights: str | None,
    formats: list[str],
    folder: str,
) -> CardFacts:
    return CardFacts(
        config=loaded.config,
        run=run_of(path),
        iteration=loaded.iteration,
        weights=weights or loaded.config.eval.weights,
        folder=folder,
        formats=formats,
        pipeline=trained.pipeline,
        network=trained.network,
        numbers=sum(param.numel() for param in loaded.model.trainable().values()),
        lora=trained.lora,
        base=trained.base,
        kohya=_kohya_file(trained),
    )


def _check_names(formats: Sequence[str], dtype: str, weights: str | None) -> None:
    """Raise ConfigError before gigabytes are read."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"export: expected formats out of {', '.join(FORMATS)}, got {name!r}")
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(
            f"export: dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}"
        )
    if weights not in (None, "ema", "current"):
        raise ConfigError(f"export: weights: expected ema or current, got {weights!r}")


def _choose(formats: Sequence[str], trained: TrainedPart) -> list[str]:
    """Return the formats, each once, in the order of FORMATS. Raise ConfigError for one that does
    not fit."""
    if not formats:
        return ["lora" if trained.layers else "merged"]
    wrong = [name for name in formats if name != "merged" and not trained.layers]
    if wrong:
        raise ConfigError(
            f"export: the format {wrong[0]} is for LoRA, but the run trained whole layers "
            "(model.tune is full); take --format merged"
        )
    return [name for name in FORMATS if name in formats]


def _layers(values: Mapping[str, Tensor]) -> dict[str, Layer]:
    """Pair the matrices of each adapted layer."""
    down, up = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
    names = [key.removesuffix(down) for key in values if key.endswith(down)]
    if 2 * len(names) != len(values):
        raise ModelError(
            "export: expected nothing but LoRA matrices A and B among the trained weights of a "
            "LoRA run"
        )
    layers = {name: Layer(values[name + down], values[name + up]) for name in names}
    for name, layer in layers.items():
        if layer.down.dim() != 2:
            raise ModelError(
                f"export: {name} is no linear layer; only LoRA of linear layers can be written"
            )
    return layers


def _peft_weights(trained: TrainedPart) -> dict[str, Tensor]:
    """Return the matrices under peft's names, without that of the adapter."""
    found: dict[str, Tensor] = {}
    for name, layer in trained.layers.items():
        found |= {f"{name}.lora_A.weight": layer.down, f"{name}.lora_B.weight": layer.up}
    return _cast(found, trained.dtype)


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {key: value.to(dtype or value.dtype).contiguous() for key, value in tensors.items()}


def _kohya_file(trained: TrainedPart) -> str:
    return f"{trained.name}-kohya.safetensors"
