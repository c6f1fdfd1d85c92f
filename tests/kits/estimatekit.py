"""Tiny models of every kind, as configs, for the tests of what they are estimated to take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import (
    tiny_flux,
    tiny_klein,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sd15,
    tiny_sdxl,
    tiny_wan,
    tiny_z_image,
)
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
from toykit import toy

from flowrl.config.load import Config
from flowrl.cost.estimate import Estimate, Phase
from flowrl.cost.memory import kept_memory
from flowrl.training.rehearsal import check_plan

MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "sd3, LoRA, guidance": (tiny_sd3, "fn: sd3, guidance: 2.0, lora: {rank: 3}"),
    "sd3, full": (lambda folder: tiny_sd3(folder, dual=True), "fn: sd3, tune: full"),
    "sd3, full, deep": (lambda folder: tiny_sd3(folder, layers=5), "fn: sd3, tune: full"),
    "sd3, full, bfloat16": (tiny_sd3, "fn: sd3, tune: full, dtype: bfloat16"),
    "flux, LoRA, bfloat16": (tiny_flux, "fn: flux, dtype: bfloat16, max_sequence_length: 16"),
    "flux, some layers, bfloat16": (
        tiny_flux,
        "fn: flux, tune: full, layers: [attn.to_q], dtype: bfloat16",
    ),
    "sd15, full, guidance": (tiny_sd15, "fn: sd15, guidance: 5.0, tune: full"),
    "sdxl, full, bfloat16": (tiny_sdxl, "fn: sdxl, tune: full, dtype: bfloat16"),
    "qwen_image, LoRA, guidance": (
        tiny_qwen_image,
        "fn: qwen_image, guidance: 2.0, max_sequence_length: 16",
    ),
    # no prompt is shorter than its template
    "z_image, full": (tiny_z_image, "fn: z_image, tune: full, max_sequence_length: 8"),
    "flux2_klein, LoRA, guidance": (
        tiny_klein,
        "fn: flux2_klein, guidance: 2.0, max_sequence_length: 16",
    ),
    "wan, LoRA, guidance": (
        tiny_wan,
        "fn: wan, frames: 5, guidance: 2.0, max_sequence_length: 16",
    ),
}


def model_config(folder: Path, model: str, *overrides: str) -> Config:
    """Return the toy config with another model."""
    return toy(folder / "toy", f"model={model}", "image={height: 64, width: 48}", *overrides)


def made(folder: Path, name: str, runtime: str = "{}") -> Config:
    """Return the toy config with a tiny pipeline of the real classes. Estimates are of fused
    attention: real runs that are compared with them say `attention: native`."""
    builder, options = MODELS[name]
    builder(folder / "weights")
    return model_config(
        folder, f"{{{options}, path: {folder}/weights, device: cpu, runtime: {runtime}}}"
    )


def sizes(config: Config) -> dict[str, int]:
    """Return the bytes of each part that is kept, by name."""
    return {part.name: part.bytes for part in kept_memory(config, check_plan(config))[0]}


def phases(found: Estimate) -> dict[str, Phase]:
    """Return the phases of an estimate by name."""
    return {phase.name: phase for phase in found.phases}


def _attended(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """PyTorch's formula, from shapes."""
    return sdpa_flop_count(query, key, value)


def _attended_back(out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """PyTorch's formula, from shapes."""
    return sdpa_backward_flop_count(out, query, key, value)


ATEN = torch.ops.aten
OF_THE_CPU = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _attended,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attended_back,
}
"""The CPU's attention, which PyTorch's counter has of its own from 2.15 on."""
