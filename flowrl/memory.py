"""Estimate what a run keeps in memory, from the config and the JSON files of the model's folder: no weight is read."""

from __future__ import annotations

import inspect
import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import nn

from flowrl.budget import Budget
from flowrl.config import Config
from flowrl.errors import ModelError
from flowrl.feasible import Forecast, is_guided
from flowrl.models.loading import locate
from flowrl.models.lora import ATTENTION, UNET_ATTENTION, find_layers
from flowrl.models.tuning import Tuning, tuning_from

FLOAT = 4  # bytes of what is always float32: latents, trained weights and all that belongs to these
CLIP_TOKENS = 77
PATCH = 2  # of FLUX, whose network takes squares of 2 x 2 latents

# What the released models' network/config.json say, for models that are not on this machine.
RELEASED: dict[str, dict[str, Any]] = {
    "sd3": {"in_channels": 16, "joint_attention_dim": 4096, "pooled_projection_dim": 2048},
    "flux": {"in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768},
    "sd15": {"in_channels": 4, "cross_attention_dim": 768},
    "sdxl": {
        "in_channels": 4,
        "cross_attention_dim": 2048,
        "projection_class_embeddings_input_dim": 2816,
        "addition_time_embed_dim": 256,
    },
}
NETWORK = {"sd3": "transformer", "flux": "transformer", "sd15": "unet", "sdxl": "unet"}
OTHERS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")


class Part(NamedTuple):
    """One line of the estimate."""

    name: str
    what: str  # how its size comes about
    bytes: int


class Sizes(NamedTuple):
    """Numbers of a pipeline's weights."""

    trained: int
    frozen: int  # of the network that is trained
    others: int  # VAE and text encoders


def estimate(config: Config, forecast: Forecast) -> tuple[list[Part], str]:
    """Return what an iteration keeps, part by part, and a note on what could not be counted (or an empty text).

    Activations, the rewards' networks and the VAE's work are never counted. Raises ModelError for a model folder that
    does not fit the config, ConfigError for a wrong `tune`, `lora` or `dtype`.
    """
    name, work = config.model.fn, forecast.work
    if name not in NETWORK:
        return [_pictures(config, work)], f"latents and parameters of the model {name} are not counted"
    folder = find_folder(str(config.model.kwargs["path"]))
    tuning = _tuning(config)
    network = RELEASED[name] | (_settings(folder, NETWORK[name]) if folder else {})
    parts = [*_stored(config, forecast.nodes, latent_shape(config, folder, network)), _pictures(config, work)]
    parts.append(_conditioning(config, work, network, tuning.dtype.itemsize))
    if folder is None:
        return parts, f"the weights of {config.model.kwargs['path']} are not on this machine: parameters not counted"
    return parts + _weights(config, sizes(config, folder, tuning), tuning), ""


def find_folder(path: str) -> Path | None:
    """Return the folder of a pipeline, or of its copy in the Hugging Face cache; None for an id that is not there."""
    source = locate(path)
    if isinstance(source, Path):
        return source
    index = try_to_load_from_cache(source, "model_index.json")
    found = Path(index).parent if isinstance(index, str) else None
    whole = found is not None and any((found / name / "config.json").exists() for name in NETWORK.values())
    return found if whole else None


def latent_shape(config: Config, folder: Path | None, network: dict[str, Any]) -> tuple[int, int, int]:
    """Return [C, h, w] of one latent, as the adapter will have it."""
    blocks = len(_settings(folder, "vae")["block_out_channels"]) if folder else 4
    factor = 2 ** (blocks - 1)
    channels = network["in_channels"] // (PATCH**2 if config.model.fn == "flux" else 1)
    return int(channels), config.image.height // factor, config.image.width // factor


def sizes(config: Config, folder: Path, tuning: Tuning) -> Sizes:
    """Count a pipeline's weights on networks that are built without them. Raises ModelError."""
    leave_out = [] if config.model.kwargs.get("t5", True) else ["text_encoder_3"]
    network = _build(folder, NETWORK[config.model.fn])
    whole = _count(network)
    present = [name for name in OTHERS if name in _kinds(folder) and name not in leave_out]
    others = sum(_count(_build(folder, name)) for name in present)
    if tuning.tune == "lora":
        adapted = find_layers(network, tuning.lora.targets, "lora.targets")
        trained = sum(tuning.lora.rank * (m.in_features + m.out_features) for m in adapted if isinstance(m, nn.Linear))
        return Sizes(trained, whole, others)
    trained = 0
    if tuning.tune == "full":
        chosen = [network] if tuning.layers is None else find_layers(network, tuning.layers, "layers")
        trained = sum(map(_count, chosen))
    return Sizes(trained, whole - trained, others)


def _tuning(config: Config) -> Tuning:
    kwargs = {name: config.model.kwargs[name] for name in ("tune", "lora", "layers", "dtype", "seed")}
    targets = ATTENTION if NETWORK[config.model.fn] == "transformer" else UNET_ATTENTION
    return tuning_from(**kwargs, device="auto", targets=targets)  # the run may be meant for another machine


def _stored(config: Config, nodes: int, shape: tuple[int, ...]) -> list[Part]:
    size = f"{nodes:,} nodes x {' x '.join(map(str, shape))} x {FLOAT} bytes"
    parts = [Part("latents", size, nodes * prod(shape) * FLOAT)]
    if "old_mean" in inspect.signature(config.loss.function).parameters:
        parts.append(Part("old means", size, parts[0].bytes))
    return parts


def _pictures(config: Config, work: Budget) -> Part:
    shape = (3, config.image.height, config.image.width)
    what = f"{work.images:,} pictures x {' x '.join(map(str, shape))} x {FLOAT} bytes"
    return Part("pictures", what, work.images * prod(shape) * FLOAT)


def _conditioning(config: Config, work: Budget, network: dict[str, Any], width: int) -> Part:
    """Count `encode`'s output: one row per prompt, and one without the prompt under guidance."""
    tokens = {"sd3": CLIP_TOKENS, "flux": 0}.get(config.model.fn, CLIP_TOKENS)
    tokens += config.model.kwargs.get("max_sequence_length", 0)
    dim = network["joint_attention_dim" if NETWORK[config.model.fn] == "transformer" else "cross_attention_dim"]
    pooled = network.get("pooled_projection_dim") or 0
    if config.model.fn == "sdxl":
        pooled = network["projection_class_embeddings_input_dim"] - 6 * network["addition_time_embed_dim"]
    rows = work.prompts * (2 if is_guided(config) else 1)
    what = f"{rows:,} rows x ({tokens} x {dim} + {pooled}) x {width} bytes"
    return Part("prompt conditioning", what, rows * (tokens * dim + pooled) * width)


def _weights(config: Config, counted: Sizes, tuning: Tuning) -> list[Part]:
    trained, frozen, others = counted
    short = tuning.dtype.itemsize
    kept = tuning.masters("it").get("it", tuning.dtype).itemsize  # full tuning keeps the whole network in float32
    copies = [("gradients", 1, True), ("AdamW's moments", 2, True), ("averaged weights (EMA)", 1, config.train.ema > 0)]
    copies.append(("base weights (KL, eval.tuned)", 1, config.kl_beta > 0 or config.eval.tuned < 1))
    parts = [
        Part("trained weights", f"{trained:,} numbers x {FLOAT} bytes", trained * FLOAT),
        Part("frozen weights", f"{frozen:,} numbers x {kept} bytes", frozen * kept),
        Part("VAE, text encoders", f"{others:,} numbers x {short} bytes", others * short),
    ]
    size = f"{trained:,} numbers x"
    return parts + [Part(name, f"{size} {n * FLOAT} bytes", trained * n * FLOAT) for name, n, there in copies if there]


def _build(folder: Path, name: str) -> nn.Module:
    """Make one part of a pipeline from its config.json, without memory for its weights."""
    settings = _settings(folder, name)
    library, kind = _kinds(folder)[name]
    try:
        with torch.device("meta"):
            if library == "diffusers":
                return getattr(diffusers, kind).from_config(settings)
            made = getattr(transformers, kind)
            return made(made.config_class.from_dict(settings))
    except Exception as error:  # the libraries raise every kind of error over a config that is not theirs
        raise ModelError(f"{folder / name}: no {kind} can be made of its config.json: {error}") from error


def _settings(folder: Path, name: str) -> dict[str, Any]:
    """Read the config.json of one part."""
    kinds = _kinds(folder)
    if name not in kinds:
        raise ModelError(f"{folder / 'model_index.json'}: expected a part named {name!r}, got {', '.join(kinds)}")
    return _read(folder / name / "config.json")


def _kinds(folder: Path) -> dict[str, Any]:
    """Return the library and class of each part that a pipeline has."""
    index = _read(folder / "model_index.json")
    return {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[0]}


def _count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file}: expected the JSON file of a diffusers pipeline: {error}") from error
