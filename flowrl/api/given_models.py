"""Models that a call was given: an id or a folder, a pipeline in memory, a FlowModel."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.handed import PYTHON, as_handed
from flowrl.config.load import Config, load_config
from flowrl.config.overrides import override_texts
from flowrl.config.values import show
from flowrl.core.devices import check_wide, kinds_of
from flowrl.core.errors import ConfigError, FlowRLError, ModelError
from flowrl.core.types import FlowModel
from flowrl.models.files.loading import locate
from flowrl.models.options import facts_of, fn_of
from flowrl.models.pipeline import class_of, from_pipeline

ModelLike = str | os.PathLike[str] | Mapping[str, Any] | FlowModel | Any
ANY = "pipeline"  # the adapter of a class that has none of its own
KEPT = ("tune", "seed", "runtime")  # options that mean the same for every adapter


class GivenModel:
    """A FlowModel of the program; each call gives it as it was when it was handed over."""

    def __init__(self, model: FlowModel) -> None:
        self.model, self.frames = model, int(getattr(model, "frames", 1))
        self.path = ""
        self._start: dict[str, Tensor] = {}
        for name, value in model.trainable().items():
            self._start[name] = value.detach().to("cpu", copy=True)

    def __call__(self) -> FlowModel:
        """Return the model with the weights that it came with."""
        with torch.no_grad():
            for name, value in self.model.trainable().items():
                value.copy_(self._start[name])
        return self.model


class GivenPipeline:
    """A loaded pipeline of diffusers, which stays as it is; each call makes a model of it."""

    def __init__(self, pipe: Any, path: str, made: Callable[..., Any]) -> None:
        """``made`` loads a folder of its class, and states the same of it."""
        self.pipe, self.path, self.facts = pipe, path, facts_of(made)

    def __call__(self, path: str, **options: Any) -> FlowModel:
        """Make a model with options of the config; its weights are those of the pipeline."""
        return from_pipeline(self.pipe, **options)


def with_model(config: Config, model: Any) -> Config:
    """Return the config with another model. Raises ConfigError for what is none, ModelError for a
    pipeline that cannot be trained."""
    if isinstance(model, str | os.PathLike):
        return _with_path(config, os.fspath(model))
    if is_pipeline(model):
        return _with_pipeline(config, model)
    if isinstance(model, FlowModel):
        return replace(config, model=as_handed("model", GivenModel(model)))
    raise ConfigError(
        "model: expected a folder or a hub id, a loaded pipeline of diffusers, or a FlowModel "
        f"(flowrl/core/types.py), got {show(model)}"
    )


def is_pipeline(model: Any) -> bool:
    """Say whether an object is a loaded pipeline of diffusers."""
    diffusers = sys.modules.get("diffusers")
    return diffusers is not None and isinstance(model, diffusers.DiffusionPipeline)


def _with_path(config: Config, path: str) -> Config:
    """Return the config with the weights of a folder or an id, and the adapter of their class."""
    if not path.strip():
        raise ConfigError("model: expected a folder or a hub id, got an empty text")
    with suppress(ModelError):  # who loads it says what is wrong with it
        return _adapted(config, _adapter(class_of(path)), {"path": path})
    return config.replace(model={"path": path})


def _with_pipeline(config: Config, pipe: Any) -> Config:
    """Return the config with a pipeline in memory.

    What is written into the run is its folder or its id, where the weights are those of there, so
    that the run can be opened without the program; else that the program has them.
    """
    network, path = _network(pipe), str(pipe.name_or_path or "")
    if getattr(network, "hf_quantizer", None) is None:  # nobody knows of scales then
        kinds = kinds_of(network.state_dict())
        check_wide(kinds, f"model: the {type(network).__name__} of the pipeline")
    where = path if path and _is_as_stored(pipe, path) else PYTHON
    dtype = next(p.dtype for p in network.parameters())
    own = {"path": where, "device": str(pipe.device), "dtype": str(dtype).removeprefix("torch.")}
    # what was asked for by name stands above what the pipeline is
    asked = {name.removeprefix("model.") for name in _overridden(config)}
    kept = {key: value for key, value in own.items() if key not in asked}
    made = _adapted(config, _adapter(type(pipe).__name__), kept)
    call = replace(made.model, function=GivenPipeline(pipe, path, made.model.function))
    return replace(made, model=call)


def _overridden(config: Config) -> list[str]:
    return [text.partition("=")[0].strip() for text in config.overrides]


def _adapter(kind: str) -> str:
    return fn_of(kind) or ANY


def _adapted(config: Config, adapter: str, own: Mapping[str, Any]) -> Config:
    """Return the config with options of its model under an adapter: all of them where it is the
    one that it has, else those that mean the same for each."""
    if config.model.fn == adapter:
        return config.replace(model=dict(own))
    options = {key: config.model.kwargs[key] for key in KEPT if key in config.model.kwargs}
    lora = config.model.kwargs.get("lora")
    if lora is not None:  # its layers have other names
        options["lora"] = {key: lora[key] for key in ("rank", "alpha") if key in lora}
    call = {"fn": adapter, **options, **own}
    return load_config(config, override_texts({"model": call}))


def _network(pipe: Any) -> Any:
    for name in ("transformer", "unet", "prior"):
        if pipe.components.get(name) is not None:
            return pipe.components[name]
    raise ConfigError(
        f"model: expected a pipeline with a transformer or a unet, got a {type(pipe).__name__} of "
        f"{', '.join(pipe.components)}"
    )


def _is_as_stored(pipe: Any, path: str) -> bool:
    """Tell whether the networks of a pipeline hold what the files of its folder hold: the first
    numbers of each tensor."""
    try:
        folder = locate(path)
    except FlowRLError:
        return False
    if isinstance(folder, str):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(folder, local_files_only=True))
        except Exception:  # it is not here, or only in part
            return False
    parts = ("transformer", "transformer_2", "unet")
    networks = {name: pipe.components.get(name) for name in parts}
    there = {name: network for name, network in networks.items() if network is not None}
    return all(_holds(network, folder / name) for name, network in there.items())


def _holds(network: Any, folder: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    values, seen = network.state_dict(), set[str]()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - no mapping
                    seen.add(name)
                    part = stored.get_slice(name)
                    first = part[:1] if part.get_shape() else stored.get_tensor(name)
                    if name not in values or not _alike(values[name], first):
                        return False
    except (OSError, SafetensorError):
        return False
    return seen == set(values)


def _alike(value: Tensor, first: Tensor) -> bool:
    own = value[:1] if value.dim() else value
    return own.shape == first.shape and torch.equal(own.cpu(), first.to(own.dtype))
