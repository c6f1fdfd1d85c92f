"""The base of all adapters: a FlowModel around one pipeline of diffusers.

A new adapter is a file with four things: a record of its options (`PipelineOptions`), what it
states of its models (`Facts`), a class on `PipelineModel`, or on `FlowMatchingModel` for a network
that predicts v, and a function of the file's own name, under ``@options_of(record, facts)``, that
loads one and wraps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from flowrl.core.types import Cond
from flowrl.models.facts import Facts
from flowrl.models.options import PipelineOptions
from flowrl.models.prompt_encoding import NEGATIVE, halves
from flowrl.models.tuned_pipeline import TunedPipeline

Options = TypeVar("Options", bound=PipelineOptions)
Network = Callable[[Tensor, Tensor, Cond], Tensor]
"""``network(x [B,*], sigma [B], cond) -> v [B,*]`` without guidance by two branches."""


class PipelineModel(ABC, Generic[Options]):
    """A FlowModel around one diffusers pipeline; see the FlowModel protocol for the contract."""

    facts: ClassVar[Facts]  # what is known of all models of the class
    one_frame = False  # the VAE is one for videos, and an image a video of one frame

    def __init__(self, tuned: TunedPipeline, options: Options) -> None:
        self.options = options
        self.dtype = tuned.tuning.dtype
        self.autocast = tuned.tuning.autocast  # float32 master weights, arithmetic in dtype
        self._tuned = tuned
        self._pipeline = tuned.pipeline

    @property
    def network(self) -> Any:
        """Return the network that is trained."""
        return self._tuned.network

    @property
    def device(self) -> torch.device:
        """Return where the network runs."""
        return self._tuned.device

    @property
    def text_device(self) -> torch.device:
        """Return where the text encoders work."""
        return self._tuned.text_device

    @property
    def weights_stay(self) -> bool:
        """Tell whether trained weights must keep their place in memory: recorded kernels read them
        there."""
        return self._tuned.tuning.runtime.cuda_graphs

    @property
    def guided(self) -> bool:
        """Tell whether each velocity takes two evaluations of the network, with and without the
        prompt."""
        return self.options.guided

    @property
    def negative_prompt(self) -> str | None:
        """Return what guidance leads away from; None: no prompt at all."""
        return self.options.negative_prompt

    @property
    def identity(self) -> dict[str, Any]:
        """Return what the trained numbers mean something with, by dotted key, as plain JSON."""
        return self._tuned.identity

    def pipeline(self) -> Any:  # diffusers does not declare its pipelines' parts as attributes
        """Return diffusers' pipeline with the current weights (shared, not copied).

        After ``tune="full"`` in a short dtype, call it under ``torch.autocast``: its network is
        float32. With ``offload`` its text encoders and VAE are on the CPU.
        """
        return self._tuned.whole()

    def can_compute_in(self, dtype: torch.dtype) -> bool:
        """Say whether `computing_in` makes a difference: the network's weights are float32."""
        return dtype != self.dtype and next(self.network.parameters()).dtype == torch.float32

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Let the network compute in another dtype for a while, to see what its rounding does."""
        kept, self.dtype = (self._tuned.tuning, self.dtype), dtype
        self._tuned.tuning = kept[0]._replace(tune="full", dtype=dtype)
        try:
            yield
        finally:
            self._tuned.tuning, self.dtype = kept

    @contextmanager
    def guiding(self, scale: float, *, off: bool = False) -> Iterator[None]:
        """Let velocities and embeddings be those of another scale of guidance for a while, with
        `off` also of none. Raises ConfigError where no option makes two branches."""
        kept = self.options
        self.options = kept.guided_by(scale, off=off)
        try:
            yield
        finally:
            self.options = kept

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the network, in module order."""
        return self._tuned.trainable()

    def from_lora(self, path: Path, alpha: float | None) -> Iterator[tuple[str, Tensor]] | None:
        """Return the trained parameters that a LoRA file of another program changes, None for what
        is no LoRA; see `flowrl.models.files.lora_start`."""
        return self._tuned.from_lora(path, alpha)

    def encode(self, prompts: list[str]) -> Cond:
        """Return the prompts' embeddings {name: [G, ...]} on the device, and ``negative_<name>``
        under guidance: zeros where there is no negative prompt."""
        negative = self.negative_prompt if self.guided else None
        cond = self._tuned.encode(prompts, self._embed, negative=negative)
        if self.guided and negative is None:
            cond |= {NEGATIVE + name: torch.zeros_like(rows) for name, rows in cond.items()}
        return cond

    def encode_ahead(self, prompts: Sequence[str]) -> None:
        """Encode prompts that will be wanted, until the memory of embeddings is full."""
        negative = self.negative_prompt if self.guided else None
        more = [] if negative is None else [negative]
        self._tuned.texts.ahead([*more, *prompts], self._embed)

    def base(self) -> AbstractContextManager[None] | None:
        """Run the network as the base model; None where it cannot leave out what is tuned."""
        return self._tuned.base()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return [C, h, w] of the latents of an image of ``height`` x ``width`` pixels, [C, t, h,
        w] of those of a video. Raise ModelError for a size that the pipeline cannot make.

        **Differs:** some pipelines round a size that does not fit, with a line in their log.
        """
        parts = {"vae": self._pipeline.vae.config}
        parts[self.facts.network] = getattr(self._pipeline, self.facts.network).config
        frames = getattr(self.options, "frames", 1)
        return self.facts.latent_shape(parts, height, width, frames=frames)

    @abstractmethod
    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device."""

    @abstractmethod
    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B,C,h,w], of x [B,C,h,w] at sigma [B]."""

    def decode(self, x0: Tensor) -> Tensor:
        """Return images [B,3,H,W], float32 in [0,1], of latents [B,C,h,w] at the grid's last
        level; ``decode_batch`` at a time."""
        with self._tuned.vae_at_work(), self._vae_precision():
            return self._decode(x0)

    def latents(self, images: Tensor) -> Tensor:
        """Return latents [B,C,h,w], float32 at level 0, of images [B,3,H,W] in [0,1]: the mode of
        the VAE's posterior, ``decode_batch`` at a time. **Differs:** Diffusion-DPO's code draws
        from the posterior."""
        with self._tuned.vae_at_work(), self._vae_precision(), torch.no_grad():
            vae = self._pipeline.vae
            found = []
            for part in images.split(self.options.decode_batch):
                pixels = (2 * part - 1).to(vae.device, vae.dtype)
                if self.one_frame:
                    found.append(vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0].float())
                else:
                    found.append(vae.encode(pixels).latent_dist.mode().float())
            return self._from_vae(torch.cat(found)).to(self.device)

    def _vae_precision(self) -> AbstractContextManager[None]:
        """Have the VAE in the precision in which it encodes and decodes."""
        return nullcontext()

    def _from_vae(self, latents: Tensor) -> Tensor:
        """Scale what the VAE gives as the network was trained on it."""
        config = self._pipeline.vae.config
        return (latents - (config.shift_factor or 0.0)) * config.scaling_factor

    def _images(self, latents: Tensor) -> Tensor:
        """Return images [B,3,H,W], float32 in [0,1], of what the VAE takes."""
        batch = self.options.decode_batch
        return decode_latents(self._pipeline, latents, batch=batch, one_frame=self.one_frame)

    @abstractmethod
    def _decode(self, x0: Tensor) -> Tensor:
        """Do the work of `decode`, with the VAE on the device."""

    @abstractmethod
    def _embed(self, prompt: str) -> dict[str, Tensor]:
        """Return what the pipeline's text encoders make of one prompt, without a batch
        dimension."""


def guided(
    network: Network,
    scale: float,
    x: Tensor,
    sigma: Tensor,
    cond: Cond,
    *,
    finish: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return u + scale (c - u) [B,*] at x [B,*], sigma [B]; u is conditioned on the ``negative_``
    rows of cond.

    Both halves run as one batch (u, c), and both are trained. ``finish(mixed, c)`` is what the
    pipeline does after mixing, such as a rescale, and is part of the gradient. **Differs:** the
    halves are mixed in float32; the pipelines mix them in the network's dtype.
    """
    negative, positive = halves(cond)
    both = {name: torch.cat([negative[name], rows]) for name, rows in positive.items()}
    u, c = network(torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
    return finish(u + scale * (c - u), c)


def decode_latents(
    pipeline: Any, latents: Tensor, *, batch: int, one_frame: bool = False
) -> Tensor:
    """Return images [B,3,H,W], float32 in [0,1], of what the VAE takes; ``batch`` at a time.
    ``one_frame``: the VAE's videos are of one frame, which is the image."""
    slices = (latents[:, :, None] if one_frame else latents).split(batch)
    decoded = [pipeline.vae.decode(part, return_dict=False)[0] for part in slices]
    if one_frame:
        decoded = [part[:, :, 0] for part in decoded]
    pixels: Tensor = pipeline.image_processor.postprocess(torch.cat(decoded), output_type="pt")
    return pixels.float()
