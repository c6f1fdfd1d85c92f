"""Devices and dtypes by name, weights that did not fit their network, memory given back."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Collection, Mapping
from typing import Any

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


_KINDS = ("missing", "unexpected", "mismatched")


def misfits(info: Mapping[str, Any], allowed: Collection[str] = ()) -> str:
    """Name what a ``from_pretrained(..., output_loading_info=True)`` says did not fit, "" if
    nothing; "missing", "unexpected" or "mismatched" may be allowed. Only with
    ``ignore_mismatched_sizes=True`` are those of another size named here, else they raise."""
    wrong = []
    for kind in _KINDS:
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names and kind not in allowed:
            wrong.append(f"{len(names)} {kind} {names[:3]}")
    return ", ".join(wrong)


def free_memory() -> None:
    """Collect garbage, and have glibc hand back what it keeps of freed memory; elsewhere the first
    alone. Otherwise freed blocks below the newest ones stay with the process, which grows from run
    to run.
    """
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
