"""Models of real size and shape with random weights and random embeddings, for measurements that
need no download."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import diffusers
import torch
from diffusers.quantizers import DiffusersAutoQuantizer
from torch import Tensor, nn
from torch.nn.functional import interpolate

from flowrl.config.load import Config
from flowrl.core.devices import pick_device
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Cond, FlowModel
from flowrl.cost.architecture import (
    SECOND,
    Architecture,
    architecture_of,
    build,
    facts_of,
    text_shape,
    tuning_of,
)
from flowrl.models.adapter import FlowMatchingModel
from flowrl.models.files.loading import Loaded
from flowrl.models.options import Facts, TextShape
from flowrl.models.prompt_encoding import NEGATIVE
from flowrl.models.runtime import quantization
from flowrl.models.tuned_pipeline import TunedPipeline

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


class RandomModel:
    """An adapter around random weights: prompts become random embeddings, and without a VAE latents
    become colours."""

    def __init__(
        self, adapter: FlowMatchingModel[Any], facts: Facts, text: TextShape, *, vae: bool
    ) -> None:
        self.adapter, self.facts, self.text, self.vae = adapter, facts, text, vae
        self.pixels = 64 // adapter.latent_shape(64, 64)[-1]  # of a latent's side
        self.frames = int(getattr(adapter, "frames", 1))

    @property
    def weights_stay(self) -> bool:
        """Tell whether trained weights must keep their place in memory."""
        return self.adapter.weights_stay

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

    def guiding(self, scale: float, *, off: bool = False) -> AbstractContextManager[None]:
        """Let it have another guidance for a while, as the adapter does."""
        return self.adapter.guiding(scale, off=off)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the adapter's velocity [B, *]."""
        return self.adapter.velocity(x, sigma, cond)

    def decode(self, x0: Tensor) -> Tensor:
        """Return images [B, 3, H, W] in [0, 1]: the VAE's, or three channels of the latents made
        larger."""
        if self.vae:
            return self.adapter.decode(x0)
        side = self.pixels
        if self.frames > 1:  # [B, C, t, h, w] -> [B, T, 3, H, W]
            size = (self.frames, *(side * length for length in x0.shape[-2:]))
            return interpolate(x0[:, :3].float().sigmoid(), size=size).transpose(1, 2)
        return interpolate(x0[:, :3].float().sigmoid(), scale_factor=side, mode="nearest")

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return [C, h, w] of an image's latents."""
        return self.adapter.latent_shape(height, width)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return self.adapter.trainable()

    def _rows(self, count: int) -> dict[str, Tensor]:
        kind: dict[str, Any] = {"device": self.adapter.device, "dtype": self.adapter.dtype}
        return self.facts.random_texts(count, self.text, **kind)


def random_model(config: Config, *, vae: bool = False) -> FlowModel:
    """Make a config's model from its architecture alone: network and, if asked for, VAE; no text
    encoders.

    Weights are drawn on the device, in the dtype that they stay in, from the config's seed, and
    then quantised where the config says so. Raises ConfigError for a kind of model that has no
    velocity field of its own, such as a UNet's, ModelError for one whose architecture is not known
    here, or that cannot be quantised here.
    """
    # refuse what has no adapter here or no known architecture
    fn, kwargs, facts = config.model.fn, config.model.kwargs, facts_of(config)
    load: Any = config.model.function
    adapter: Any = get_type_hints(load)["return"] if facts else object
    if facts is None or not issubclass(adapter, FlowMatchingModel):
        raise ConfigError(f"model.fn: random weights are made for flow-matching adapters, got {fn}")
    architecture, device = architecture_of(config), pick_device(str(kwargs["device"]))
    if not architecture.known:
        raise ModelError(
            f"the architecture of {kwargs['path']!r} is not known: it is neither here nor released"
        )
    # weights from the config's seed; the caller's random state stays as it was
    tuning = tuning_of(config)._replace(device=device)
    wide = tuning.network_dtype
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        network = _drawn(architecture, facts.network, device, wide)
        quantise(network, tuning.runtime.quantize, dtype=tuning.dtype, device=device)
        width = facts.vae_dtype(tuning.dtype)
        held = vae or facts.video  # that of videos is always there
        parts = {"vae": _drawn(architecture, "vae", device, width) if held else None}
    # the parts as a pipeline, on which the model's own adapter is put
    part = architecture.part("scheduler")
    scheduler = getattr(diffusers, part.kind).from_config(part.settings)
    if SECOND in architecture.parts:
        raise ModelError("random weights are made for models of one network, not for two experts")
    pipeline = _pipeline(facts, {facts.network: network, "scheduler": scheduler, **parts})
    tuned = TunedPipeline(Loaded(pipeline, Path(), (), lambda: None), tuning)
    if not held:  # sizes of latents are read from its settings
        pipeline.register_modules(vae=build(architecture, "vae"))
    made = adapter(tuned, load.options(**kwargs))
    return RandomModel(made, facts, text_shape(config, architecture), vae=vae)


def _pipeline(facts: Facts, parts: dict[str, Any]) -> Any:
    """Make the pipeline without text encoders."""
    kind = getattr(diffusers, facts.pipeline)
    taken = inspect.signature(kind).parameters.values()
    needed = [one.name for one in taken if one.default is one.empty]
    return kind(**{**dict.fromkeys(needed), **parts})


def _drawn(
    architecture: Architecture, name: str, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    with _default(dtype):
        network = build(architecture, name, str(device))
    nn.Module.to(network, dtype)  # tables that are made in float32 whatever the default
    # what diffusers keeps in float32 when it reads a network, such as Wan's norms
    wide = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    for key, p in network.named_parameters():
        if wide & set(key.split(".")):
            p.data = p.data.float()
    return network.requires_grad_(False).eval()


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
