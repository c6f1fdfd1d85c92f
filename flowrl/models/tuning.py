"""Which weights of a pipeline are trained, in which dtype, and how: the options that every adapter takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from flowrl.devices import DTYPES, pick_device
from flowrl.errors import ConfigError
from flowrl.models.loading import pick_dtype
from flowrl.models.lora import ATTENTION, Lora, add_lora, find_layers, lora_from
from flowrl.models.runtime import Runtime, runtime_from


class Tuning(NamedTuple):
    """Checked options; see `tuning_from`."""

    tune: str
    lora: Lora
    layers: Sequence[str] | None
    seed: int
    device: torch.device
    dtype: torch.dtype  # of frozen weights and of the arithmetic; trained weights are float32 always
    runtime: Runtime = Runtime()

    @property
    def autocast(self) -> bool:
        """Tell whether float32 master weights are computed with in another dtype."""
        return self.tune == "full" and self.dtype != torch.float32

    def masters(self, network: str) -> dict[str, torch.dtype]:
        """Return the dtypes of the parts that are not loaded in ``dtype``."""
        return {network: torch.float32} if self.tune == "full" else {}


def tuning_from(
    *,
    tune: str,
    lora: dict[str, Any] | None,
    layers: Sequence[str] | None,
    dtype: str,
    device: str,
    seed: int,
    runtime: dict[str, Any] | None = None,
    targets: tuple[str, ...] = ATTENTION,
) -> Tuning:
    """Check the options before gigabytes are read; ``targets`` get LoRA if ``lora`` names none. Raise ConfigError.

    **Differs:** float16 is refused for training. Gradients below 6e-8 vanish in it unless the loss is scaled up, which
    flowrl does not do; bfloat16 has float32's range.
    """
    if tune not in ("lora", "full", "none"):
        raise ConfigError(f"tune: expected 'lora', 'full' or 'none', got {tune!r}")
    if lora is not None and tune != "lora":
        raise ConfigError(f"lora: has no effect unless tune is 'lora', got tune {tune!r}")
    if layers is not None and tune != "full":
        raise ConfigError(f"layers: has no effect unless tune is 'full', got tune {tune!r}; with LoRA see lora.targets")
    if layers is not None and (
        isinstance(layers, str) or not layers or not all(isinstance(n, str) and n for n in layers)
    ):
        raise ConfigError(f"layers: expected a list of layer names, got {layers!r}")
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "float16" and tune != "none":
        raise ConfigError(
            "dtype: float16 cannot train: small gradients vanish in it, as flowrl does not scale the loss. Set it to"
            " bfloat16 or float32 (with tune none, float16 can be used to sample)"
        )
    how = runtime_from(runtime)
    if how.quantize != "none" and tune != "lora":
        raise ConfigError(f"runtime.quantize: quantised weights are frozen, so it needs tune 'lora', got {tune!r}")
    spec, target = lora_from(lora, targets), pick_device(device)
    return Tuning(tune, spec, layers, seed, target, pick_dtype(dtype, target), how)


def tune_network(network: nn.Module, tuning: Tuning) -> None:
    """Make trainable what was asked for in a frozen network. Raise ModelError if a target or a layer is not there."""
    if tuning.tune == "lora":
        add_lora(network, tuning.lora, seed=tuning.seed)
    if tuning.tune == "full":
        for module in [network] if tuning.layers is None else find_layers(network, tuning.layers, "layers"):
            module.requires_grad_(True)
    network.eval()


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained by their name in the network, in module order."""
    return {name: param for name, param in network.named_parameters() if param.requires_grad}
