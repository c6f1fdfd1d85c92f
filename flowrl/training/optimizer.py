"""The optimizers that a config can name: functions of the parameters, found by their names."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Interval

from flowrl.config.calls import Call
from flowrl.config.values import MOST
from flowrl.core.errors import ConfigError, install

Positive = Annotated[float, Interval(gt=0, le=MOST)]
Share = Annotated[float, Interval(ge=0, lt=1)]


def make_optimizer(
    call: Call, params: list[torch.nn.Parameter], *, sharded: bool = False
) -> torch.optim.Optimizer:
    """Make the optimizer of an `optimizer` section. Raises ConfigError if it cannot be had here."""
    if sharded and call.function is adamw8bit:
        raise ConfigError(
            "optimizer.fn=adamw8bit does not go with FSDP, which shares the moments out instead; "
            "take adamw"
        )
    made: torch.optim.Optimizer = call.make()(params)
    return made


def adamw(
    params: list[torch.nn.Parameter],
    *,
    lr: Positive = 3.0e-4,
    betas: tuple[Share, Share] = (0.9, 0.999),
    eps: Positive = 1.0e-8,
    weight_decay: Annotated[float, Interval(ge=0, le=MOST)] = 1.0e-4,
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), two float32 moments for each trained number.

    With `eps` far above the size of single gradients it is SGD with momentum at the rate lr / eps.
    """
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return torch.optim.AdamW(params, lr=lr, foreach=True, **options)  # type: ignore[arg-type]


def adamw8bit(
    params: list[torch.nn.Parameter],
    *,
    lr: Positive = 3.0e-4,
    betas: tuple[Share, Share] = (0.9, 0.999),
    eps: Positive = 1.0e-8,
    weight_decay: Annotated[float, Interval(ge=0, le=MOST)] = 1.0e-4,
) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits each, block by block (Dettmers et al. 2022, 2110.02861).

    They take 2 bytes a number in place of 8; tensors of fewer than 4096 numbers keep 32 bits.
    Raises ConfigError without the package bitsandbytes.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer.fn=adamw8bit needs the package bitsandbytes: "
            f"{install('quant')}, or take adamw"
        ) from error
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    made: torch.optim.Optimizer = AdamW8bit(params, lr=lr, **options)
    return made
