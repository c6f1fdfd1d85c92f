"""Read VideoAlign's public folder: settings, weights with or without their base, LoRA merged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.files import read_json

from .._backbones.qwen2_vl import own_name
from .._common.scorer import first_line, load_network, local, read_weights, source_of

WHO = "rewards.videoalign"
SETTINGS = "model_config.json"
DIMENSIONS = ("VQ", "MQ", "TA")


class Settings(NamedTuple):
    """What `model_config.json` says."""

    base: str  # folder or hub id of the Qwen2-VL that was tuned
    outputs: int  # of the head: 3, or 1 for all three tokens alike
    fps: float  # frames a second that are shown
    frames: int | None  # or how many in all
    pixels: int  # of a frame, at most
    scale: float  # of LoRA
    means: tuple[float, ...]  # of VQ, MQ, TA
    stds: tuple[float, ...]


def read_folder(path: str) -> Path:
    """Return the folder of a path, or that of a hub repository. Raises ModelError."""
    here = local(path)
    if here.is_dir():
        return here
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except Exception as error:
        raise ModelError(
            f"{WHO}: {path!r} is no folder here and no hub repository that can be fetched now: "
            f"{first_line(error)}. Check the spelling and the network, or give a folder"
        ) from error


def read_settings(folder: Path) -> Settings:
    """Read `model_config.json`. Raises ModelError for one of another kind of model."""
    file = folder / SETTINGS
    try:
        options = read_json(file, dict[str, Any], error=ValueError)
        # three sections of training settings; means and stds make z-scores of raw scores
        data, model, lora = (options[f"{key}_config"] for key in ("data", "model", "peft_lora"))
        norm = options.get("inference_config") or {}
        means = tuple(float(norm.get(f"{name}_mean", 0.0)) for name in DIMENSIONS)
        stds = tuple(float(norm.get(f"{name}_std", 1.0)) for name in DIMENSIONS)
        # LoRA's scale: alpha / rank, or with rsLoRA alpha / sqrt(rank)
        frames, rank = data.get("num_frames"), float(lora.get("lora_r", 16))
        scale = float(lora.get("lora_alpha", 32)) / rank ** (0.5 if lora.get("use_rslora") else 1)
        settings = Settings(
            base=str(model["model_name_or_path"]),
            outputs=int(model.get("output_dim", 1)),
            fps=float(data.get("fps", 2.0)),
            frames=None if frames is None else int(frames),
            pixels=int(data.get("max_frame_pixels", 240 * 320)),
            scale=scale,
            means=means,
            stds=stds,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{WHO}: {file}: expected VideoAlign's settings (data_config, model_config, "
            f"peft_lora_config): {type(error).__name__}: {first_line(error)}"
        ) from error
    # readable, but is it a model that we can build?
    _check(file, data, model, settings)
    return settings


def _check(file: Path, data: Mapping[str, Any], model: Mapping[str, Any], read: Settings) -> None:
    """Refuse settings of a model that is asked otherwise. Raises ModelError."""
    for name, expected, got in [
        ("use_special_tokens", True, bool(model.get("use_special_tokens"))),
        ("prompt_template_type", "detailed_special", data.get("prompt_template_type")),
        ("sample_type", "uniform", data.get("sample_type", "uniform")),
        ("output_dim of 3 or 1", True, read.outputs in (1, 3)),
        ("stds above 0", True, min(read.stds) > 0),
    ]:
        if got != expected:
            raise ModelError(f"{WHO}: {file}: expected {name} {expected!r}, got {got!r}")


def read_state(folder: Path, settings: Settings, base: str) -> tuple[dict[str, Tensor], Path]:
    """Read the newest checkpoint of a folder -> tensors under Qwen2-VL's names, LoRA merged, and
    the file. Raises ModelError.

    It holds all weights in `model.pth`, or LoRA in `adapter_model.safetensors` and what else was
    trained in `non_lora_state_dict.pth`, over the weights of `base`.
    """
    steps = sorted(folder.glob("checkpoint-*"), key=_step)
    if not steps:
        raise ModelError(f"{WHO}: {folder}: expected a folder checkpoint-STEP in it, found none")
    full, adapter = steps[-1] / "model.pth", steps[-1] / "adapter_model.safetensors"
    if full.is_file():
        return merged(_plain(read_weights(full, WHO)), settings.scale), full
    state = _base(base)
    state |= _plain(read_weights(steps[-1] / "non_lora_state_dict.pth", WHO))
    lora = _plain(read_weights(adapter, WHO))
    for key in lora:
        weight = f"{_layer(key)}.weight"
        if weight not in state and f"{_layer(key)}.base_layer.weight" not in state:
            raise ModelError(f"{WHO}: {adapter}: {key} belongs to no layer of {base}")
    return merged(state | lora, settings.scale), adapter


def merged(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Add each layer's ``scale B A`` to its weights, in float32, and drop LoRA's names."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        if "lora_" not in key:
            out[key.replace(".base_layer.", ".")] = value
    for key, down in state.items():
        if ".lora_A." in key:
            up = state[key.replace(".lora_A.", ".lora_B.")]
            name = f"{_layer(key)}.weight"
            change = scale * (up.float() @ down.float())
            out[name] = (out[name].float() + change).to(out[name].dtype)
    return out


def _layer(key: str) -> str:
    return key.partition(".lora_")[0]


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {own_name(key.removeprefix("base_model.model.")): v for key, v in state.items()}


def _step(folder: Path) -> int:
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def _base(path: str) -> dict[str, Tensor]:
    """Return the weights of the public Qwen2-VL, under transformers' own names."""
    from transformers import Qwen2VLForConditionalGeneration

    kind: Any = Qwen2VLForConditionalGeneration
    network = load_network(kind, source_of(path), who=WHO, expected="a Qwen2-VL")
    found: dict[str, Tensor] = network.state_dict()
    return found
