"""The four adapters on tiny pipelines, for the tests of what they share: how a network runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from modelkit import noise
from tiny import tiny_flux, tiny_sd3, tiny_sd15, tiny_sdxl
from torch import Tensor

from flowrl.core.types import FlowModel
from flowrl.models.flux import flux
from flowrl.models.sd3 import sd3
from flowrl.models.sd15 import sd15
from flowrl.models.sdxl import sdxl

PROMPTS = ["a red square", "two blue circles"]
ADAPTERS: dict[str, Callable[..., Any]] = {"sd3": sd3, "flux": flux, "sd15": sd15, "sdxl": sdxl}
TOKENS: dict[str, dict[str, Any]] = {
    "sd3": {"max_sequence_length": 24},
    "flux": {"max_sequence_length": 24},
}
LORA = {"rank": 2}


def make_folders(root: Path) -> dict[str, Path]:
    """Save one tiny pipeline per adapter; SD3's has T5 and, in its first block, SD3.5's second
    attention."""
    return {
        "sd3": tiny_sd3(root / "sd3", t5=True, dual=True),
        "flux": tiny_flux(root / "flux"),
        "sd15": tiny_sd15(root / "sd15"),
        "sdxl": tiny_sdxl(root / "sdxl"),
    }


def load(
    folders: dict[str, Path], fn: str, *, runtime: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Load the tiny pipeline of an adapter, with LoRA of rank 2 unless told otherwise."""
    filled = ({"lora": LORA} if options.get("tune", "lora") == "lora" else {}) | {"device": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step-distilled models are the business of test_flux.py
        return ADAPTERS[fn](
            str(folders[fn]), runtime=runtime, **(filled | TOKENS.get(fn, {}) | options)
        )


def network(model: Any) -> Any:
    """Return the network that is trained."""
    return model.unet if "unet" in model.pipeline().components else model.transformer


def velocity(model: FlowModel, count: int = 2, height: int = 32, width: int = 32) -> Tensor:
    """Ask for the velocity of ``count`` latents, the second half of them at a later noise level
    than the first."""
    x, sigmas = noise(model, count, height, width), model.sigmas(4, height, width)
    cond = model.encode([PROMPTS[i % 2] for i in range(count)])
    return model.velocity(x, sigmas[1 + torch.arange(count) * 2 // count], cond)
