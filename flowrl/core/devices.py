"""Devices and dtypes by the names that a config gives them."""

from __future__ import annotations

import torch

from flowrl.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_device(name: str, who: str = "") -> torch.device:
    """Return the device of that name, whether or not this machine has it; ``auto`` is CUDA where
    there is one.

    Raises ConfigError that names `who` for what flowrl does not run on: log-probs are float64,
    which not every device has.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{who}: device" if who else "device"
    wrong = ConfigError(f"{where}: expected 'auto', 'cpu' or 'cuda[:n]', got {name!r}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong from error
    if device.type not in ("cpu", "cuda"):
        raise wrong
    return device


def pick_device(name: str, who: str = "") -> torch.device:
    """Return the device of that name as `named_device` does. Raises ConfigError too where this
    machine lacks it."""
    where = f"{who}: device" if who else "device"
    device = named_device(name, who)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{where}: {name!r} asked for, but torch finds no CUDA device; use 'auto' or 'cpu'"
        )
    return device
