"""Quantised weights for the network under LoRA, through diffusers' quantization settings."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

from flowrl.core.errors import ModelError
from flowrl.core.installation import install

PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}
NF4_DEVICES = ("cuda",)  # where diffusers loads bitsandbytes' weights


def quantization(
    name: str, networks: tuple[str, ...], *, dtype: torch.dtype, device: torch.device
) -> Any:
    """Return diffusers' settings that quantise the linear layers of the parts ``networks``; None
    for ``none``.

    ``nf4`` is QLoRA's 4-bit type (2305.14314) by bitsandbytes, ``int8`` rounds weights only, by
    torchao. **Differs:** bitsandbytes' own int8 also quantises activations, by what the rows of a
    batch have in common: a log-prob would depend on which samples are evaluated together. Raise
    ModelError if the package is missing, or the device is not one that it works on.
    """
    if name == "none":
        return None
    # what cannot work is said before the weights are read
    if name == "nf4" and device.type not in NF4_DEVICES:
        raise ModelError(
            f"runtime.quantize: 'nf4' needs a CUDA device, got {device}: diffusers loads "
            "bitsandbytes' weights"
            " nowhere else. 'int8' works here"
        )
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise ModelError(
            f"runtime.quantize: {name!r} needs the package {PACKAGES[name]}: {install('quant')}, "
            "or leave it at none"
        )
    # the networks only: VAE and text encoders stay as they are
    return PipelineQuantizationConfig(
        quant_mapping={part: _nf4(dtype) if name == "nf4" else _int8() for part in networks}
    )


def _nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def _int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())
