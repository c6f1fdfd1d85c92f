"""Models of real size and shape with random weights and random embeddings, for measurements that need no download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.nn.functional import interpolate

from flowrl.blueprint import NETWORK, Blueprint, Text, blueprint, build, text_shape, tuning_of
from flowrl.config import Config
from flowrl.devices import pick_device
from flowrl.errors import ConfigError, ModelError
from flowrl.models.core import Core
from flowrl.models.flux import GUIDANCE, Flux
from flowrl.models.loading import Loaded
from flowrl.models.sd3 import SD3
from flowrl.models.texts import NEGATIVE
from flowrl.types import Cond, FlowModel

PIXELS = 8  # of a latent's side


class RandomModel:
    """An adapter around random weights: prompts become random embeddings, and without a VAE latents become colours."""

    def __init__(self, adapter: SD3 | Flux, text: Text, *, vae: bool) -> None:
        self.adapter, self.text, self.vae = adapter, text, vae

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the adapter's noise levels [S+1]."""
        return self.adapter.sigmas(steps, height, width)

    def encode(self, prompts: list[str]) -> Cond:
        """Return random embeddings {name: [G, ...]} of the right sizes; under guidance the negative ones, too."""
        made = self._rows(len(prompts))
        return made | ({NEGATIVE + k: v for k, v in self._rows(len(prompts)).items()} if self.adapter.guided else {})

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the adapter's velocity [B, *]."""
        return self.adapter.velocity(x, sigma, cond)

    def decode(self, x0: Tensor) -> Tensor:
        """Return pictures [B, 3, H, W] in [0, 1]: the VAE's, or three channels of the latents made larger."""
        if self.vae:
            return self.adapter.decode(x0)
        return interpolate(x0[:, :3].float().sigmoid(), scale_factor=PIXELS, mode="nearest")

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return [C, h, w] of a picture's latents."""
        return self.adapter.latent_shape(height, width)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return self.adapter.trainable()

    def _rows(self, count: int) -> dict[str, Tensor]:
        shapes = {"embeds": (self.text.tokens, self.text.width), "pooled": (self.text.pooled,)}
        like = {"device": self.adapter.device, "dtype": self.adapter.dtype}
        return {name: torch.randn(count, *shape, **like) for name, shape in shapes.items()}  # type: ignore[call-overload]


def random_model(config: Config, *, vae: bool = False) -> FlowModel:
    """Make a config's model from its architecture alone: network and, if asked for, VAE; no text encoders.

    Weights are drawn on the device, in the dtype that they stay in, from the config's seed. Raises ConfigError for a
    kind of model that is neither ``sd3`` nor ``flux``, ModelError for one whose architecture is not known here.
    """
    fn, kwargs = config.model.fn, config.model.kwargs
    if fn not in _ADAPTERS:
        raise ConfigError(f"model.fn: random weights are made for {' and '.join(_ADAPTERS)}, got {fn}")
    plan, device = blueprint(config), pick_device(str(kwargs["device"]))
    if not plan.known:
        raise ModelError(f"the architecture of {kwargs['path']!r} is not known: it is neither here nor released")
    tuning = tuning_of(config)._replace(device=device)
    wide = tuning.masters("it").get("it", tuning.dtype)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        network = _drawn(plan, NETWORK[fn], device, wide)
        parts = {"vae": _drawn(plan, "vae", device, tuning.dtype) if vae else None}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(plan.piece("scheduler").settings)
    pipeline = _pipeline(fn, {"transformer": network, "scheduler": scheduler, **parts})
    core = Core(Loaded(pipeline, Path(), (), lambda: None), tuning)
    return RandomModel(_ADAPTERS[fn](core, plan, kwargs), text_shape(config, plan), vae=vae)


def _sd3(core: Core, plan: Blueprint, kwargs: dict[str, Any]) -> SD3:
    return SD3(
        core,
        guidance=kwargs["guidance"],
        negative_prompt="",
        max_sequence_length=kwargs["max_sequence_length"],
        decode_batch=kwargs["decode_batch"],
    )


def _flux(core: Core, plan: Blueprint, kwargs: dict[str, Any]) -> Flux:
    told = GUIDANCE if kwargs["guidance"] is None else kwargs["guidance"]
    return Flux(
        core,
        guidance=told if plan.piece("transformer").settings.get("guidance_embeds") else None,
        true_cfg_scale=kwargs["true_cfg_scale"],
        negative_prompt="",
        max_sequence_length=kwargs["max_sequence_length"],
        decode_batch=kwargs["decode_batch"],
    )


_ADAPTERS: dict[str, Callable[[Core, Blueprint, dict[str, Any]], SD3 | Flux]] = {"sd3": _sd3, "flux": _flux}
_TEXTS = {"sd3": ("", "_2", "_3"), "flux": ("", "_2")}


def _pipeline(fn: str, parts: dict[str, Any]) -> Any:
    """Make the pipeline without text encoders."""
    kind = {"sd3": StableDiffusion3Pipeline, "flux": FluxPipeline}[fn]
    texts = {f"{name}{number}": None for name in ("text_encoder", "tokenizer") for number in _TEXTS[fn]}
    return kind(**parts, **texts)


def _drawn(plan: Blueprint, name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    with _default(dtype):
        network = build(plan, name, str(device))
    nn.Module.to(network, dtype)  # tables that are made in float32 whatever the default
    return network.requires_grad_(False).eval()


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
