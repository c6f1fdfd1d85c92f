"""The weights that a run begins with, where these are not the model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flowrl.config.overrides import parse_yaml
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.shipped_files import resource
from flowrl.training import checkpoint
from flowrl.training.checkpoint_files import CheckpointTensors
from flowrl.training.mean_weights import mean_weights
from flowrl.training.weights import put_saved, put_weights


def check_start(start: str | Sequence[str], key: str = "train.start") -> None:
    """Raise ConfigError unless a key such as `train.start` is empty, or names weights that are
    there; of a list all of them. Raises CheckpointError for runs of different LoRA settings."""
    _check_alike([_file_of(one, key) for one in names_of(start)], key)


def names_of(start: str | Sequence[str]) -> list[str]:
    """List the weights that a key such as `train.start` names: one text, several, or none."""
    return [*filter(None, [start])] if isinstance(start, str) else [*start]


def start_from(
    start: str | Sequence[str], params: dict[str, nn.Parameter], key: str = "train.start"
) -> None:
    """Put the weights that a key such as `train.start` names into the parameters: a safetensors
    file of them, a checkpoint, or a run's newest one, of which the averaged weights are taken if
    there are any. Of several the mean, as `mean_weights` says.

    Raises: ConfigError if there is none, CheckpointError if they do not fit the model, are another
    program's LoRA, or differ in their tensors or LoRA's rank or alpha, or are to be averaged and
    not finite.
    """
    paths = [_file_of(one, key) for one in names_of(start)]
    _check_alike(paths, key)
    if len(paths) > 1:
        runs = ((str(path), _tensors(path, params, key)) for path in paths)
        put_weights(params, _of_kinds(mean_weights(runs), params), paths[0])
        return
    path = paths[0]
    if path.is_dir():
        files, _ = checkpoint.open_checkpoint(path)
        put_saved(params, files, _averaged(files))
        return
    put_weights(params, _of_kinds(_tensors(path, params, key), params), path)


def _check_alike(paths: Sequence[Path], key: str) -> None:
    """Refuse runs whose configs give LoRA another rank or alpha: what an adapter adds is scaled by
    alpha / rank. A file with no config beside it is taken to be as the others."""
    several = paths if len(paths) > 1 else []
    known = [(path, found) for path in several if (found := _lora_of(path))]
    for path, (rank, alpha) in known[1:]:
        first, (size, scale) = known[0]
        if (rank, alpha) != (size, scale):
            raise CheckpointError(
                f"{key}: {path} has LoRA of rank {rank} and alpha {alpha:g}, and {first} of rank "
                f"{size} and alpha {scale:g}; expected runs of one rank and one alpha: train them "
                "with the same model.lora, or begin with one of them"
            )


def _lora_of(path: Path) -> tuple[int, float] | None:
    """Return rank and alpha by the config that is saved in a checkpoint; None where it names none,
    or trains no LoRA."""
    from flowrl.models.lora import LoraOptions  # late: it loads peft

    file = (path if path.is_dir() else path.parent) / checkpoint.STATE
    try:
        config = parse_yaml(json.loads(file.read_text(encoding="utf-8"))["config"], str(file))
        model = config["model"]
        lora = LoraOptions(**(model.get("lora") or {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None
    return None if model.get("tune", "lora") != "lora" else (lora.rank, lora.alpha)


def _tensors(path: Path, params: Mapping[str, nn.Parameter], key: str) -> dict[str, Tensor]:
    """Read a safetensors file, or a checkpoint's weights, whole -> {name: tensor}."""
    if path.is_dir():
        files, _ = checkpoint.open_checkpoint(path)
        return files[_averaged(files)]
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{key}: {path}: no safetensors file: {error}") from error
    if params.keys().isdisjoint(tensors) and any(map(_of_lora, tensors)):
        raise CheckpointError(
            f"{key}: {path}: a LoRA file of another program, with names such as "
            f"{min(tensors)}; expected weights that a run of flowrl saved. Let diffusers merge it "
            "into the base model first: docs/models.md, Begin with a LoRA"
        )
    return tensors


def _averaged(files: CheckpointTensors) -> str:
    return "ema" if "ema" in files else "current"


def _of_kinds(
    tensors: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Return tensors in the kinds of the parameters of their names; others as they are."""
    return {
        name: rows.to(params[name]) if name in params else rows for name, rows in tensors.items()
    }


def _file_of(start: str, key: str) -> Path:
    """Return the file or checkpoint folder that a key names. Raises ConfigError."""
    try:
        path = resource(start)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if path.is_file() or (path / checkpoint.MANIFEST).is_file():
        return path
    newest = checkpoint.latest(path) if path.is_dir() else None
    if newest is None:
        raise ConfigError(
            f"{key}: there are no weights at {start}: expected a .safetensors file, a "
            "checkpoint or a run with one, of the same model and layers"
        )
    return newest


def _of_lora(name: str) -> bool:
    """Say whether diffusers, peft or kohya call a tensor of a LoRA so."""
    return any(part in name.lower() for part in ("lora_", ".lora", "hada_w", "lokr_w"))
