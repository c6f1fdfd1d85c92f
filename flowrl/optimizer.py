"""The optimizer of a run, by the name that a config gives it."""

from __future__ import annotations

from typing import Any

import torch

from flowrl.config import TrainConfig
from flowrl.errors import ConfigError


def make_optimizer(t: TrainConfig, params: list[torch.nn.Parameter], *, sharded: bool = False) -> torch.optim.Optimizer:
    """Make AdamW (Loshchilov and Hutter 2019) of a `train` section. Raises ConfigError.

    adamw8bit keeps its moments in 8 bits each, block by block (Dettmers et al. 2022, 2110.02861), 2 bytes a number in
    place of 8; tensors of fewer than 4096 numbers keep 32 bits.
    """
    options: dict[str, Any] = {"lr": t.lr, "betas": t.betas, "eps": t.eps, "weight_decay": t.weight_decay}
    if t.optimizer == "adamw":
        return torch.optim.AdamW(params, **options, foreach=True)
    if sharded:
        raise ConfigError("train.optimizer=adamw8bit does not go with FSDP, which shares the moments out instead")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "train.optimizer=adamw8bit needs the package bitsandbytes: pip install 'flowrl[quant]', or take adamw"
        ) from error
    made: torch.optim.Optimizer = AdamW8bit(params, **options)
    return made
