"""Low-rank adapters (LoRA, Hu et al. 2021) through peft, drawn from a seed and kept in float32."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch import nn

from flowrl.errors import ConfigError, ModelError

ATTENTION = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)

UNET_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")  # of both attentions of a block


class Lora(NamedTuple):
    """Size and place of the adapters; the defaults are Flow-GRPO's for SD3 (scripts/train_sd3.py)."""

    rank: int = 32
    alpha: float = 64.0  # the update is scaled by alpha / rank
    targets: tuple[str, ...] = ATTENTION  # a linear layer is adapted if its name is, or ends in, a dot and one of these
    init: str = "gaussian"  # A ~ N(0, 1/rank^2), B = 0, so that the adapted network starts as the base network


def lora_from(options: dict[str, Any] | None, targets: tuple[str, ...] = ATTENTION) -> Lora:
    """Check the user's ``lora`` options against the fields of Lora, with ``targets`` by default. Raise ConfigError."""
    options = {"targets": targets} | dict(options or {})
    unknown = sorted(set(options) - set(Lora._fields))
    if unknown:
        raise ConfigError(f"lora: unknown option {unknown[0]!r}; expected some of {', '.join(Lora._fields)}")
    if isinstance(options.get("targets"), list):
        options["targets"] = tuple(options["targets"])
    lora = Lora(**options)
    if isinstance(lora.rank, bool) or not isinstance(lora.rank, int) or lora.rank < 1:
        raise ConfigError(f"lora.rank: expected a whole number of at least 1, got {lora.rank!r}")
    if isinstance(lora.alpha, bool) or not isinstance(lora.alpha, int | float) or not lora.alpha > 0:
        raise ConfigError(f"lora.alpha: expected a positive number, got {lora.alpha!r}")
    named = isinstance(lora.targets, tuple) and all(isinstance(target, str) and target for target in lora.targets)
    if not named or not lora.targets:
        raise ConfigError(f"lora.targets: expected a list of layer names, got {lora.targets!r}")
    if lora.init != "gaussian":
        raise ConfigError(f"lora.init: expected 'gaussian', got {lora.init!r}")
    return lora


def add_lora(network: Any, lora: Lora, *, seed: int) -> dict[str, nn.Parameter]:
    """Put adapters on a diffusers network, freeze the rest and return the adapters' parameters by name.

    **Differs:** peft draws A from the global generator in the dtype of the base; here A is drawn in float32 from
    ``seed`` alone, so that every rank, device and base dtype starts from the same adapters.
    Raise ModelError if a target matches no linear layer.
    """
    find_layers(network, lora.targets, "lora.targets")
    network.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=0.0,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        network.add_adapter(config)
    params = {name: param for name, param in network.named_parameters() if param.requires_grad}
    generator = torch.Generator().manual_seed(seed)
    for name, param in params.items():
        start = torch.zeros(param.shape)
        if ".lora_A." in name:
            start = torch.randn(param.shape, generator=generator) / lora.rank
        # An optimizer step of 1e-4 on a bfloat16 weight would be lost to rounding.
        param.data = start.to(param.device)
    return params


def find_layers(network: nn.Module, names: Sequence[str], where: str) -> list[nn.Module]:
    """Return the linear layers whose name is, or ends in, a dot and one of ``names``; ModelError if one has none."""
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    found: dict[str, nn.Module] = {}
    for wanted in names:
        fits = {name: module for name, module in linear.items() if name == wanted or name.endswith(f".{wanted}")}
        if not fits:
            short = sorted({re.sub(r"^.*\.\d+\.(?=\D)", "", name) for name in linear})
            raise ModelError(f"{where}: no linear layer is named {wanted!r}; available: {', '.join(short)}")
        found |= fits
    return list(found.values())
