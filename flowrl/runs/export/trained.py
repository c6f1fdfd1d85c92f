"""What a run trained, apart from the run: the weights of a network, or of Wan 2.2's two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import FlowModel
from flowrl.models.wan_experts import Experts
from flowrl.runs.export.kohya import Layer

NETWORKS = ("transformer", "unet")  # the part of a pipeline that is trained
SECOND = "transformer_2"  # and the other one, of Wan 2.2
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
    second: TrainedPart | None = None  # the other expert of Wan 2.2

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
    network = next((part for part in NETWORKS if part in pipeline.components), None)
    if network is None or not params:
        raise ModelError(
            "export: there is nothing to export, the model has no trained weights (tune: none)"
        )
    values = {key: value.detach().cpu() for key, value in params.items()}
    if not isinstance(getattr(model, "network", None), Experts):
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
    layers = {name: Layer(values[name + down], values[name + up]) for name in names}
    for name, layer in layers.items():
        if layer.down.dim() != 2:
            raise ModelError(
                f"export: {name} is no linear layer; only LoRA of linear layers can be written"
            )
    return layers
