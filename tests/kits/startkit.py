"""Models whose prompts start from images, and Wan's two experts, as the contract battery has the
others: tiny pipelines of the real classes, saved once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from adapterkit import PROMPTS, TOKENS, seeds
from modelkit import noise
from tiny import tiny_flux, tiny_i2v, tiny_qwen_edit, tiny_ti2v, tiny_wan22
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.core.types import Cond, Rollout, Source
from flowrl.models.flux_kontext import flux_kontext
from flowrl.models.qwen_edit import qwen_edit
from flowrl.models.qwen_edit_plus import qwen_edit_plus
from flowrl.models.wan import wan
from flowrl.models.wan_i2v import wan_i2v

SIZE = (32, 32)


class Start(NamedTuple):
    """A tiny pipeline, its adapter, and the options that it is tested with."""

    make: Callable[[Path], Path]
    load: Callable[..., Any]
    options: dict[str, Any]
    blocks: tuple[str, ...]  # the classes of the network's blocks
    sources: int = 1  # of a prompt


QWEN = {"source_pixels": 64 * 64, "max_sequence_length": 400}
VIDEO = {"frames": 5}
FLUX = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
STARTS = {
    "kontext": Start(
        partial(tiny_flux, seed=7, kontext=True),
        flux_kontext,
        {"max_sequence_length": TOKENS},
        FLUX,
    ),
    "qwen_edit": Start(tiny_qwen_edit, qwen_edit, QWEN, ("QwenImageTransformerBlock",)),
    "qwen_edit_plus": Start(
        partial(tiny_qwen_edit, plus=True, zero_cond_t=True),
        qwen_edit_plus,
        QWEN | {"seen_pixels": 96 * 96},
        ("QwenImageTransformerBlock",),
        2,
    ),
    "experts": Start(
        tiny_wan22, wan, VIDEO | {"max_sequence_length": TOKENS}, ("WanTransformerBlock",), 0
    ),
    "i2v": Start(partial(tiny_i2v, experts=False), wan_i2v, VIDEO, ("WanTransformerBlock",)),
    "i2v, experts": Start(
        partial(tiny_i2v, experts=True), wan_i2v, VIDEO, ("WanTransformerBlock",)
    ),
    "ti2v": Start(tiny_ti2v, wan_i2v, VIDEO, ("WanTransformerBlock",)),
}
VIDEOS = ("experts", "i2v", "i2v, experts", "ti2v")


class Starts:
    """The folder of each of STARTS, saved when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self._made:
            folder = self.root / name.replace(", ", "-")
            self._made[name] = STARTS[name].make(folder)
        return self._made[name]

    def load(self, name: str, **options: Any) -> Any:
        """Load a pipeline by its adapter, on the CPU, with LoRA of rank 2 unless told otherwise."""
        start = STARTS[name]
        lora = {"lora": {"rank": 2}} if options.get("tune", "lora") == "lora" else {}
        how = {"device": "cpu", **start.options, **lora, **options}
        return start.load(str(self[name]), **how)


def sources(name: str, count: int, seed: int = 3) -> list[Source]:
    """Draw what prompts start from, of 8 bits as files have them."""
    side = 2 * SIZE[0] if name == "ti2v" else SIZE[0]
    draw = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (count, STARTS[name].sources, 3, side, side), generator=draw)
    return [tuple(row / 255) for row in levels]


def size_of(name: str) -> tuple[int, int]:
    """Return height and width of a tiny image; TI2V's tokens are larger."""
    return (64, 64) if name == "ti2v" else SIZE


def encoded(name: str, model: Any, count: int = 2) -> Cond:
    """Encode prompts, each with sources of its own."""
    prompts = [PROMPTS[i % 2] for i in range(count)]
    if not STARTS[name].sources:
        found: Cond = model.encode(prompts)
        return found
    given = sources(name, 2)
    found = model.encode_with_sources(prompts, [given[i % 2] for i in range(count)])
    return found


def velocity_of(name: str, model: Any, count: int = 2) -> Tensor:
    """Ask for the velocity of `count` latents, the second half at a later noise level."""
    x, sigmas = noise(model, count, *size_of(name)), model.sigmas(4, *size_of(name))
    found: Tensor = model.velocity(
        x, sigmas[1 + torch.arange(count) * 2 // count], encoded(name, model, count)
    )
    return found


def sampled_from(name: str, model: Any, transition: Any, noise_scale: float = 0.7) -> Rollout:
    """Roll out two images of each of two prompts, with noise on every step, in calls of four."""
    size = size_of(name)
    return rollout(
        model,
        encoded(name, model),
        full(0, steps=4, noise_scale=noise_scale),
        transition,
        sigmas=model.sigmas(4, *size),
        shape=model.latent_shape(*size),
        group_size=2,
        generators=seeds(2),
        micro_batch=4,
    )
