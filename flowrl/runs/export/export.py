"""Write what a run trained as files for other programs, with a model card: one folder, ready for a
hub."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

from flowrl.config.calls import PYTHON
from flowrl.config.load import Config
from flowrl.core.devices import DTYPES, named_device
from flowrl.core.errors import ConfigError, ModelError, RunError
from flowrl.core.files import replacing
from flowrl.core.types import FlowModel
from flowrl.models.files.lora_names import Layer, Place, find_place
from flowrl.models.files.lora_read import LORA_FILE, PEFT_FILE, SECOND_LORA_FILE
from flowrl.models.options import (
    modelspec_of,
)
from flowrl.models.tuning import (
    pick_dtype,
)
from flowrl.runs.export.card import base_name, write_card
from flowrl.runs.export.merge import INDEX, NETWORKS, SECOND, Change, save_sorted, write_pipeline
from flowrl.runs.export.usage import CardFacts, low_noise
from flowrl.runs.folder import ENVIRONMENT, read_object
from flowrl.runs.open_run import OpenedRun, Which, load_run, run_of

ADAPTER = "default"  # the name that peft gives the adapter


@runtime_checkable
class HasPipeline(FlowModel, Protocol):
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
    second: TrainedPart | None = None  # the other expert

    @property
    def scale(self) -> float:
        """Return what the product of an adapter's matrices is multiplied with."""
        return float(self.lora["lora_alpha"]) / int(self.lora["r"])

    def module(self, name: str = "") -> Any:
        """Return the trained network, or a layer of it."""
        return getattr(self.pipeline, self.network).get_submodule(name)


def trained_part(
    model: Any, *, name: str = "model", dtype: torch.dtype | None = None
) -> TrainedPart:
    """Find what is trained in a model around a diffusers pipeline. Raise ModelError if there is
    none, or nothing is."""
    if not isinstance(model, HasPipeline):
        raise ModelError(
            f"export: expected a model around a diffusers pipeline, got a {type(model).__name__}; "
            "its weights are in the checkpoint's safetensors files"
        )
    # the trained network
    pipeline, params = model.pipeline(), model.trainable()
    networks = [part for part in NETWORKS if part in pipeline.components]
    if not networks or not params:
        raise ModelError(
            "export: there is nothing to export, the model has no trained weights (tune: none)"
        )
    network, values = networks[0], {key: value.detach().cpu() for key, value in params.items()}
    if not hasattr(getattr(model, "network", None), SECOND):
        return _part(pipeline, network, values, name, dtype)
    second = _part(pipeline, SECOND, _under(SECOND, values), name, dtype)
    first = _part(pipeline, network, _under(network, values), name, dtype)
    return first._replace(second=second)


def _under(network: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of one of two networks, by their names in it."""
    start = f"{network}."
    return {key.removeprefix(start): v for key, v in values.items() if key.startswith(start)}


def _part(
    pipeline: Any, network: str, values: dict[str, Tensor], name: str, dtype: torch.dtype | None
) -> TrainedPart:
    """Say what was trained of one network."""
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


def _layers(values: Mapping[str, Tensor]) -> dict[str, Layer]:
    """Pair the matrices of each adapted layer."""
    down, up = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"
    names = [key.removesuffix(down) for key in values if key.endswith(down)]
    if 2 * len(names) != len(values):
        raise ModelError(
            "export: expected nothing but LoRA matrices A and B among the trained weights of a "
            "LoRA run"
        )
    layers = {}
    for name in names:
        layers[name] = Layer(values[name + down], values[name + up])
        if layers[name].down.dim() != 2:
            raise ModelError(
                f"export: {name} is no linear layer; only LoRA of linear layers can be written"
            )
    return layers


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
    config: Config | None = None,
) -> list[str]:
    """Write the weights of the run or checkpoint `path` into the folder `out` -> the names of the
    files there.

    `formats` are of `FORMATS`: lora, peft and kohya for a run that trained LoRA, merged for any; by
    default lora, peft where diffusers reads no LoRA, or merged for a run that trained without.
    `weights` is ema or current, by default what the run's evaluations take. `dtype` ``auto`` keeps
    every number as it was trained. `base_model` is the hub id of the base model for card and
    adapters, where the run used a local folder; `config` is as of `load_run`. The folder is there
    whole or not at all. Raises ConfigError for a format that does not fit, RunError if `out` holds
    something or cannot be written, ModelError and CheckpointError as `load_run` does.
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
        path,
        weights=weights,
        iteration=iteration,
        overrides=overrides,
        plugins=plugins,
        config=config,
    )
    trained = trained_part(loaded.model, name=loaded.config.name, dtype=DTYPES.get(dtype))
    trained = trained._replace(base=base_model or base_name(loaded.config))
    chosen = _choose(formats, trained)
    if "merged" in chosen and loaded.config.model.kwargs.get("path") == PYTHON:
        raise ConfigError(
            "export: merged: the run trained a pipeline in memory, whose weights are not those of "
            f"the folder that it came from: {_IN_A_FOLDER}"
        )
    # the files
    with replacing(out) as folder:
        folder.mkdir()
        for name in chosen:
            FORMATS[name](trained, folder)
        write_card(_facts(Path(path), loaded, trained, weights, chosen, out.name), folder)
        files = [file for file in folder.rglob("*") if file.is_file()]
        return sorted(file.relative_to(folder).as_posix() for file in files)


def modelspec(
    trained: TrainedPart, *, code: str = "diffusers", whole: bool = False
) -> dict[str, str]:
    """Return the metadata of a file in the words of Stability AI's ModelSpec 1.0.0; `code` says in
    whose names the layers are, `whole` that it is no LoRA."""
    network, scheduler = trained.module(), trained.pipeline.scheduler.config
    kind = modelspec_of(type(network).__name__, network.config)
    if not whole:
        kind += "/lora"
    found = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": kind,
        "modelspec.implementation": code,
        "modelspec.title": trained.name,
        "modelspec.description": "trained by reinforcement learning with flowrl",
    }
    predicts = {"epsilon": "epsilon", "v_prediction": "v"}.get(scheduler.get("prediction_type"))
    if predicts:
        found["modelspec.prediction_type"] = predicts
    return found


def write_lora(trained: TrainedPart, folder: Path) -> None:
    """Write the file that ``load_lora_weights`` of the pipeline reads, or of a class without it its
    network's ``load_lora_adapter``, with rank and alpha in its metadata; a second one for another
    expert, to be loaded into that."""
    saves = hasattr(type(trained.pipeline), "save_lora_weights")
    for part, file in ((trained, LORA_FILE), (trained.second, SECOND_LORA_FILE)):
        if part is not None and not saves:
            about = {LORA_ADAPTER_METADATA_KEY: json.dumps(part.lora, sort_keys=True)}
            metadata = {"format": "pt", **about, **modelspec(part)}
            save_sorted(_peft_weights(part), folder / file, metadata=metadata)
        elif part is not None:
            options = {
                f"{trained.network}_lora_layers": _peft_weights(part),
                f"{trained.network}_lora_adapter_metadata": part.lora,
            }
            type(trained.pipeline).save_lora_weights(folder, weight_name=file, **options)
            _add_modelspec(folder / file, modelspec(part))


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
    save_sorted(tensors, folder / PEFT_FILE, metadata={"format": "pt", **modelspec(trained)})


def _add_modelspec(file: Path, spec: Mapping[str, str]) -> None:
    """Write a small file again with more metadata."""
    with safe_open(file, framework="pt") as stored:
        names, about = stored.keys(), stored.metadata() or {}
        tensors = {name: stored.get_tensor(name) for name in names}
    save_sorted(tensors, file, metadata={**about, **spec})


def write_kohya(trained: TrainedPart, folder: Path) -> None:
    """Write one file with the keys of kohya's sd-scripts and ComfyUI, of two experts one for
    each."""
    for part in filter(None, (trained, trained.second)):
        network = part.module()
        tensors = kohya_weights(
            part.layers,
            network=type(network).__name__,
            config=network.config,
            scale=part.scale,
            rows=partial(_rows, part),
        )
        name = _kohya_file(trained)
        if part is trained.second:
            name = low_noise(name)
        about = {"format": "pt", **modelspec(part, code="sd-scripts")}
        save_sorted(_cast(tensors, trained.dtype), folder / name, metadata=about)


def kohya_weights(
    layers: Mapping[str, Layer],
    *,
    network: str,
    config: Mapping[str, Any],
    scale: float,
    rows: Callable[[str], int],
) -> dict[str, Tensor]:
    """Return the tensors of a kohya file for the adapters of a diffusers ``network`` (its class)
    with that ``config``: the layout of sd-scripts and musubi-tuner, which ComfyUI reads too.

    A key is ``lora_unet_`` and the layer's name in the model's own code
    (`flowrl.models.files.lora_names`), dots written as ``_``, then ``lora_down.weight`` [r, in],
    ``lora_up.weight`` [out, r] and ``alpha``; the weight moves by ``alpha / r * up @ down``.

    ``scale`` is alpha / r of every layer; ``rows`` gives the outputs of a layer that has no
    adapter, where one beside it is held together with it. Layers that are held as one become one
    adapter of the sum of their ranks, exactly. Raise ModelError for a network or a layer without
    known names.
    """
    places: dict[str, Place] = {}
    for name in layers:
        place = find_place(name, network, config)
        places[place.key] = place
    found: dict[str, Tensor] = {}
    for place in places.values():
        parts: list[Layer | int] = []
        for name in place.parts:
            if name in layers:
                parts.append(layers[name])
            else:
                parts.append(rows(name))
        down, up = fuse(parts)
        if place.swapped:
            up = torch.cat(up.chunk(2)[::-1])
        key = "lora_unet_" + place.key.replace(".", "_")
        found[f"{key}.lora_down.weight"] = down.contiguous()
        found[f"{key}.lora_up.weight"] = up.contiguous()
        found[f"{key}.alpha"] = torch.tensor(scale * len(down))
    return found


def fuse(parts: Sequence[Layer | int]) -> Layer:
    """Make one adapter of the adapters of layers whose rows are stacked; a number is the rows of
    one without adapter.

    down is all of theirs [sum r, in], up [sum out, sum r] has theirs on its diagonal and zeros
    elsewhere, so that ``up @ down`` is the stack of their products.
    """
    down = torch.cat([part.down for part in parts if isinstance(part, Layer)])
    # the rows of each, zero but in the columns of its own
    blocks, column = [], 0
    for part in parts:
        if isinstance(part, int):
            blocks.append(down.new_zeros(part, len(down)))
            continue
        outputs, rank = part.up.shape
        block = down.new_zeros(outputs, len(down))
        block[:, column : column + rank] = part.up
        blocks.append(block)
        column += rank
    return Layer(down, torch.cat(blocks))


def _rows(trained: TrainedPart, layer: str) -> int:
    """Return the outputs of a layer of the trained network."""
    return int(trained.module(layer).out_features)


def write_merged(trained: TrainedPart, folder: Path) -> None:
    """Write a whole pipeline, from the base model's own files and the trained weights, added up in
    float32."""
    base = _base_folder(trained.pipeline)
    parts = [part for part in (trained, trained.second) if part is not None]
    changes = {part.network: _changes(part) for part in parts}
    specs = {part.network: modelspec(part, whole=True) for part in parts}
    write_pipeline(base, folder, changes=changes, dtype=trained.dtype, about=specs)


def _base_folder(pipeline: Any) -> Path:
    """Return the folder that a pipeline was loaded from, also by its id on the hub. Raise
    ModelError where there is none."""
    name = str(pipeline.name_or_path or "")
    folder = Path(name)
    if name and not (folder / INDEX).is_file():
        with contextlib.suppress(Exception):  # it is no id, or not here
            folder = Path(snapshot_download(name, local_files_only=True))
    if not name or not (folder / INDEX).is_file():
        whose = "without one"
        if name:
            whose = f"of {name}, which is not here"
        raise ModelError(
            f"merged: expected the folder of the base model, got a pipeline in memory {whose}: "
            f"{_IN_A_FOLDER}"
        )
    return folder


_IN_A_FOLDER = (
    "save it as it was before training with pipe.save_pretrained(FOLDER), and open the run with "
    "model=FOLDER; or take another format"
)


def _changes(trained: TrainedPart) -> dict[str, Change]:
    """Return what becomes of each tensor of a network's files."""

    found: dict[str, Change] = {}
    for name, value in trained.weights.items():
        found[name] = partial(_replaced, value)
    for name, layer in trained.layers.items():
        found[f"{name}.weight"] = partial(_moved, layer, trained.scale)
    return found


def _moved(layer: Layer, scale: float, stored: Tensor) -> Tensor:
    return stored.float() + scale * (layer.up.float() @ layer.down.float())


def _replaced(value: Tensor, stored: Tensor) -> Tensor:
    return value.float()


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
        dtype=_dtype(loaded.config, run_of(path)),
        second=trained.second is not None,
    )


def _dtype(config: Config, run: Path) -> str:
    """Return the dtype of a run's arithmetic. ``auto`` is what it was where the run was trained,
    as far as the run tells: with a GPU bfloat16, without one what it is on this machine's CPU."""
    name = str(config.model.kwargs.get("dtype", "float32"))
    if name != "auto":
        return name
    device, machine = str(config.model.kwargs["device"]), read_object(run, ENVIRONMENT)
    if device == "auto" and machine:
        device = "cuda" if machine.get("gpus") else "cpu"
    return str(pick_dtype(name, named_device(device, "model"))).removeprefix("torch.")


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
    reads = hasattr(trained.pipeline, "save_lora_weights")
    if not formats:
        if not trained.layers:
            return ["merged"]
        return ["lora" if reads else "peft"]
    for name in formats:
        if name != "merged" and not trained.layers:
            raise ConfigError(
                f"export: the format {name} is for LoRA, but the run trained whole layers "
                "(model.tune is full); take --format merged"
            )
    if "lora" in formats and not reads:
        raise ConfigError(
            f"export: diffusers reads no LoRA into a {type(trained.pipeline).__name__}; take "
            "--format peft or merged"
        )
    if "peft" in formats and trained.second is not None:
        raise ConfigError(
            "export: the format peft holds one network, but two were trained; take --format lora, "
            "kohya or merged"
        )
    return [name for name in FORMATS if name in formats]


def _peft_weights(trained: TrainedPart) -> dict[str, Tensor]:
    """Return the matrices under peft's names, without that of the adapter."""
    found: dict[str, Tensor] = {}
    for name, layer in trained.layers.items():
        found |= {f"{name}.lora_A.weight": layer.down, f"{name}.lora_B.weight": layer.up}
    return _cast(found, trained.dtype)


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {key: value.to(dtype or value.dtype).contiguous() for key, value in tensors.items()}


def _kohya_file(trained: TrainedPart) -> str:
    if trained.second is not None:
        return f"{trained.name}-kohya-high-noise.safetensors"
    return f"{trained.name}-kohya.safetensors"
