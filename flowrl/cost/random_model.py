"""Models of real size and shape with random weights and random embeddings, for measurements that
need no download."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.nn.functional import interpolate

from flowrl.config.load import Config
from flowrl.core.devices import pick_device
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Cond, FlowModel
from flowrl.cost.architecture import (
    NETWORK,
    Architecture,
    TextShape,
    architecture_of,
    build,
    text_shape,
    tuning_of,
)
from flowrl.models.flux import Flux, FluxOptions
from flowrl.models.loading import Loaded
from flowrl.models.options import checked
from flowrl.models.pipeline import TunedPipeline
from flowrl.models.sd3 import SD3, SD3Options
from flowrl.models.texts import NEGATIVE

PIXELS = 8  # of a latent's side


class RandomModel:
    """An adapter around random weights: prompts become random embeddings, and without a VAE latents
    become colours."""

    def __init__(self, adapter: SD3 | Flux, text: TextShape, *, vae: bool) -> None:
        self.adapter, self.text, self.vae = adapter, text, vae

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the adapter's noise levels [S+1]."""
        return self.adapter.sigmas(steps, height, width)

    def encode(self, prompts: list[str]) -> Cond:
        """Return random embeddings {name: [G, ...]} of the right sizes; under guidance the negative
        ones, too."""
        made = self._rows(len(prompts))
        return made | (
            {NEGATIVE + k: v for k, v in self._rows(len(prompts)).items()}
            if self.adapter.guided
            else {}
        )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the adapter's velocity [B, *]."""
        return self.adapter.velocity(x, sigma, cond)

    def decode(self, x0: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1]: the VAE's, or three channels of the latents made
        larger."""
        if self.vae:
            return self.adapter.decode(x0)
        return interpolate(x0[:, :3].float().sigmoid(), scale_factor=PIXELS, mode="nearest")

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return [C, h, w] of an image's latents."""
        return self.adapter.latent_shape(height, width)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return self.adapter.trainable()

    def _rows(self, count: int) -> dict[str, Tensor]:
        shapes = {"embeds": (self.text.tokens, self.text.width), "pooled": (self.text.pooled,)}
        device, dtype = self.adapter.device, self.adapter.dtype
        return {
            name: torch.randn(count, *shape, device=device, dtype=dtype)
            for name, shape in shapes.items()
        }


def random_model(config: Config, *, vae: bool = False) -> FlowModel:
    """Make a config's model from its architecture alone: network and, if asked for, VAE; no text
    encoders.

    Weights are drawn on the device, in the dtype that they stay in, from the config's seed. Raises
    ConfigError for a kind of model that is neither ``sd3`` nor ``flux``, ModelError for one whose
    architecture is not known here.
    """
    fn, kwargs = config.model.fn, config.model.kwargs
    if fn not in _ADAPTERS:
        raise ConfigError(
            f"model.fn: random weights are made for {' and '.join(_ADAPTERS)}, got {fn}"
        )
    architecture, device = architecture_of(config), pick_device(str(kwargs["device"]))
    if not architecture.known:
        raise ModelError(
            f"the architecture of {kwargs['path']!r} is not known: it is neither here nor released"
        )
    tuning = tuning_of(config)._replace(device=device)
    wide = tuning.network_dtype
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        network = _drawn(architecture, NETWORK[fn], device, wide)
        parts = {"vae": _drawn(architecture, "vae", device, tuning.dtype) if vae else None}
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(architecture.part("scheduler").settings)
    pipeline = _pipeline(fn, {"transformer": network, "scheduler": scheduler, **parts})
    tuned = TunedPipeline(Loaded(pipeline, Path(), (), lambda: None), tuning)
    adapter, options = _ADAPTERS[fn]
    made = adapter(tuned, checked(options, **kwargs))
    return RandomModel(made, text_shape(config, architecture), vae=vae)


_ADAPTERS: dict[str, tuple[Any, Any]] = {"sd3": (SD3, SD3Options), "flux": (Flux, FluxOptions)}
_TEXTS = {"sd3": ("", "_2", "_3"), "flux": ("", "_2")}


def _pipeline(fn: str, parts: dict[str, Any]) -> Any:
    """Make the pipeline without text encoders."""
    kind = {"sd3": StableDiffusion3Pipeline, "flux": FluxPipeline}[fn]
    texts = {
        f"{name}{number}": None for name in ("text_encoder", "tokenizer") for number in _TEXTS[fn]
    }
    return kind(**parts, **texts)


def _drawn(
    architecture: Architecture, name: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    with _default(dtype):
        network = build(architecture, name, str(device))
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
