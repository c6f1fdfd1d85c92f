"""Write what a run trained as files for other programs, with a model card: one folder, ready for a
hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.devices import DTYPES, named_device
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.files import replacing
from flowrl.models.options import pick_dtype
from flowrl.runs.best import Which
from flowrl.runs.export.card import base_name, write_card
from flowrl.runs.export.kohya import Layer, kohya_weights
from flowrl.runs.export.merged import Change, write_pipeline
from flowrl.runs.export.trained import TrainedPart as TrainedPart
from flowrl.runs.export.trained import trained_part as trained_part
from flowrl.runs.export.usage import LORA_FILE, SECOND_LORA_FILE, CardFacts
from flowrl.runs.folder import ENVIRONMENT, read_object
from flowrl.runs.open import OpenedRun, load_run, run_of

PEFT_FILE = "adapter_model.safetensors"  # the name that peft looks for


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


def write_lora(trained: TrainedPart, folder: Path) -> None:
    """Write the file that ``load_lora_weights`` of the pipeline reads, with rank and alpha in its
    metadata; a second one for Wan 2.2's other expert, to be loaded into that."""
    for part, file in ((trained, LORA_FILE), (trained.second, SECOND_LORA_FILE)):
        if part is not None:
            options = {
                f"{trained.network}_lora_layers": _peft_weights(part),
                f"{trained.network}_lora_adapter_metadata": part.lora,
            }
            type(trained.pipeline).save_lora_weights(folder, weight_name=file, **options)


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
    base = Path(trained.pipeline.name_or_path)
    changes = {part.network: _changes(part) for part in (trained, trained.second) if part}
    write_pipeline(base, folder, changes=changes, dtype=trained.dtype)


def _changes(trained: TrainedPart) -> dict[str, Change]:
    """Return what becomes of each tensor of a network's files."""

    def moved(layer: Layer, stored: Tensor) -> Tensor:
        return stored.float() + trained.scale * (layer.up.float() @ layer.down.float())

    def replaced(value: Tensor, stored: Tensor) -> Tensor:
        return value.float()

    found: dict[str, Change] = {k: partial(replaced, v) for k, v in trained.weights.items()}
    return found | {f"{k}.weight": partial(moved, layer) for k, layer in trained.layers.items()}


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
    if not formats:
        return ["lora" if trained.layers else "merged"]
    wrong = [name for name in formats if name != "merged" and not trained.layers]
    if wrong:
        raise ConfigError(
            f"export: the format {wrong[0]} is for LoRA, but the run trained whole layers "
            "(model.tune is full); take --format merged"
        )
    one = [name for name in formats if name in ("peft", "kohya")]
    if one and trained.second is not None:
        raise ConfigError(
            f"export: the format {one[0]} holds one network, but two were trained, as of Wan 2.2; "
            "take --format lora or merged"
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
    return f"{trained.name}-kohya.safetensors"
