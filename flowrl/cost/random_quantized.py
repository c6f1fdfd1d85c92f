"""Random weights quantised as diffusers quantises those that it reads."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.quantizers import DiffusersAutoQuantizer
from torch import nn

from flowrl.models.runtime import quantization

PART = "transformer"  # any name: the settings are made for a part of a pipeline


def quantise(network: Any, kind: str, *, dtype: torch.dtype, device: torch.device) -> None:
    """Quantise the linear layers of a network of diffusers in place, by diffusers' own code for
    ``kind``, one layer after the other; LoRA must not be on it yet.

    Raise ModelError where ``kind`` does not work, as loading does.
    """
    settings = quantization(kind, (PART,), dtype=dtype, device=device)
    if settings is None:
        return
    # the weights as they were drawn, then layers without any
    drawn = dict(network.named_parameters())
    quantizer = DiffusersAutoQuantizer.from_config(
        settings.quant_mapping[PART], pre_quantized=False
    )
    wide = list(network._keep_in_fp32_modules or ())
    quantizer.preprocess_model(model=network, device_map=None, keep_in_fp32_modules=wide)
    # each weight is let go once it is quantised, so that few are there twice
    for key in [*drawn]:
        value = drawn.pop(key)
        if quantizer.check_if_quantized_param(network, value, key, {}, param_device=device):
            quantizer.create_quantized_param(network, value.data, key, device, {}, [], dtype=dtype)
        elif network.get_parameter(key).is_meta:
            owner, _, name = key.rpartition(".")
            module = network.get_submodule(owner)
            module.register_parameter(name, nn.Parameter(value.data, requires_grad=False))
    quantizer.postprocess_model(network)
    network.hf_quantizer = quantizer
    network.requires_grad_(False)
