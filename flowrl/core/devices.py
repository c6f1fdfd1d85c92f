"""Devices and dtypes by the names that a config gives them."""

from __future__ import annotations

import torch

from flowrl.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str, who: str = "") -> torch.device:
    """Return the device of that name; ``auto`` is CUDA where there is one. Raises ConfigError that
    names `who`."""
    where = f"{who}: device" if who else "device"
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{where}: expected 'auto', 'cpu' or 'cuda[:n]', got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{where}: {name!r} asked for, but torch finds no CUDA device; use 'auto' or 'cpu'"
        )
    return device
