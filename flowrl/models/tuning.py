"""Which weights of a pipeline are trained, in which dtype, and where: options made concrete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from flowrl.core.devices import DTYPES, pick_device
from flowrl.models.lora import LoraOptions, add_lora, find_layers
from flowrl.models.options import PipelineOptions
from flowrl.models.runtime import Runtime


class Tuning(NamedTuple):
    """What `pick_tuning` makes of the options."""

    tune: str
    lora: LoraOptions
    targets: Sequence[str]  # names of the layers that get LoRA
    layers: Sequence[str] | None
    seed: int
    device: torch.device
    dtype: torch.dtype  # of frozen weights and of the arithmetic; trained weights are float32
    runtime: Runtime = Runtime()

    @property
    def autocast(self) -> bool:
        """Tell whether float32 master weights are computed with in another dtype."""
        return self.tune == "full" and self.dtype != torch.float32

    @property
    def network_dtype(self) -> torch.dtype:
        """Return the dtype that the network is loaded in: full tuning keeps all of it in
        float32."""
        return torch.float32 if self.tune == "full" else self.dtype


def pick_tuning(options: PipelineOptions, targets: Sequence[str]) -> Tuning:
    """Pick device and dtype; ``targets`` get LoRA if the options name none. Raise ConfigError for
    a device that is not here."""
    lora = options.lora or LoraOptions()
    device = pick_device(options.device)
    return Tuning(
        tune=options.tune,
        lora=lora,
        targets=lora.targets or targets,
        layers=options.layers,
        seed=options.seed or 0,
        device=device,
        dtype=pick_dtype(options.dtype, device),
        runtime=options.how,
    )


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; ``auto`` is bfloat16 on CUDA and on CPUs that multiply in it,
    else float32."""
    if name != "auto":
        return DTYPES[name]
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    fast = device.type == "cuda" or able.get("avx512_bf16") or able.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def tune_network(network: nn.Module, tuning: Tuning) -> None:
    """Make trainable what was asked for in a frozen network. Raise ModelError if a target or a
    layer is not there."""
    if tuning.tune == "lora":
        add_lora(network, tuning.lora, tuning.targets, seed=tuning.seed)
    if tuning.tune == "full":
        for module in fully_trained(network, tuning):
            module.requires_grad_(True)
    network.eval()


def fully_trained(network: nn.Module, tuning: Tuning) -> list[nn.Module]:
    """Return the modules whose own weights are trained under ``tune: full``. Raise ModelError for
    a layer that is not there."""
    if tuning.layers is None:
        return [network]
    return find_layers(network, tuning.layers, "layers")


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained by their name in the network, in module order."""
    return {name: param for name, param in network.named_parameters() if param.requires_grad}
