"""The base of all adapters: a FlowModel around one pipeline of diffusers.

A new adapter is a file with four things: a record of its options (`PipelineOptions`), what it
states of its models (`Facts`), a class on `PipelineModel`, or on `FlowMatchingModel` for a network
that predicts v, and a function of the file's own name, under ``@options_of(record, facts)``, that
loads one and wraps it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Cond
from flowrl.models.options import PATCH, Facts, PipelineOptions
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
        kept, self.dtype = self.dtype, dtype
        try:
            with self._tuned.computing_in(dtype):
                yield
        finally:
            self.dtype = kept

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
        more = []
        if self.guided and self.negative_prompt is not None:
            more.append(self.negative_prompt)
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
    decoded = []
    for part in latents.split(batch):
        if one_frame:
            part = part[:, :, None]
        found = pipeline.vae.decode(part, return_dict=False)[0]
        if one_frame:
            found = found[:, :, 0]
        decoded.append(found)
    pixels: Tensor = pipeline.image_processor.postprocess(torch.cat(decoded), output_type="pt")
    return pixels.float()


# --------------------------------------------------------- networks that predict v on the flow path


class FlowMatchingModel(PipelineModel[Options]):
    """A FlowModel around a pipeline with a FlowMatchEulerDiscreteScheduler.

    An adapter writes `_embed`, `_network`, and `_token_side` or `_tokens`.
    """

    # whether the pipeline spreads the steps evenly before the shift
    even_steps = False
    # whether it leaves them to a scheduler with use_flow_sigmas, a leftover of other schedulers
    reads_flow_sigmas = False

    @property
    def transformer(self) -> Any:
        """Return the network that is trained."""
        return self.network

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device, ending in 0.

        A resolution-dependent shift is applied if the scheduler's config asks for it.
        """
        scheduler, tokens = self._pipeline.scheduler, self._tokens(height, width)
        own = self.reads_flow_sigmas and scheduler.config.get("use_flow_sigmas", False)
        even = self.even_steps and not own
        return pipeline_sigmas(
            scheduler,
            steps,
            tokens=tokens,
            device=self.device,
            levels=self._levels if even else None,
            mu=self._mu,
        )

    def _levels(self, steps: int) -> Sequence[float]:
        """Return the levels before the shift, as the pipeline spreads them."""
        return np.linspace(1.0, 1 / steps, steps)  # type: ignore[return-value]

    def _mu(self, steps: int, tokens: int) -> float:
        """Return the shift of an image of so many tokens, if the scheduler shifts by resolution."""
        config = self._pipeline.scheduler.config
        shift: float = calculate_shift(
            tokens,
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        return shift

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity u + scale (c - u), float32 [B,C,h,w], of x [B,C,h,w] at sigma
        [B].

        The unconditional and the conditional half run as one batch, and both are trained; see
        `guided` for how they are mixed.
        """
        if not self.guided:
            return self._network(x, sigma, cond)
        scale = self.options.cfg_scale
        return guided(self._network, scale, x, sigma, cond, finish=self._guided)

    def _guided(self, mixed: Tensor, c: Tensor) -> Tensor:
        """Return what the pipeline makes of the mixed velocity; c is the conditional branch."""
        return mixed

    def _decode(self, x0: Tensor) -> Tensor:
        vae, config = self._pipeline.vae, self._pipeline.vae.config
        latents = x0.to(vae.device, vae.dtype) / config.scaling_factor + config.shift_factor
        return self._images(latents)

    @abstractmethod
    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return v [B,C,h,w] of one evaluation of the network, without guidance."""

    def _timesteps(self, sigma: Tensor) -> Tensor:
        """Return sigma [B] in the scheduler's unit, from 1000 at pure noise to 0: float32, on the
        model's device."""
        scale = self._pipeline.scheduler.config.num_train_timesteps
        return sigma.to(self.device, torch.float32) * scale

    def _tokens(self, height: int, width: int) -> int:
        """Return how many tokens an image of so many pixels has in the network. Raise ModelError
        for a size that the pipeline cannot make."""
        rows, columns = self.latent_shape(height, width)[-2:]
        side = self._token_side()
        return (rows // side) * (columns // side)

    def _token_side(self) -> int:
        """Return how many latents a token is high and wide."""
        return 1


def guidance_rows(guidance: float | None, x: Tensor) -> Tensor | None:
    """Return the guidance number for each row of x [B, *] -> [B] float32; None for a network
    without an input for it."""
    return None if guidance is None else torch.full((len(x),), guidance, device=x.device)


def check_scheduler(pipeline: Any, path: str) -> None:
    """Raise ModelError for a scheduler that is not the plain Euler one."""
    scheduler = pipeline.scheduler.config
    if scheduler.invert_sigmas or scheduler.stochastic_sampling:
        raise ModelError(
            f"{path}: scheduler with invert_sigmas or stochastic_sampling; flowrl needs the plain "
            "Euler one"
        )


def check_configs(pipeline: Any, path: str, *, channels: int) -> None:
    """Raise ModelError where the settings contradict what a FlowModel with ``channels`` latent
    channels promises."""
    check_scheduler(pipeline, path)
    vae = pipeline.vae.config
    if vae.shift_factor is None or vae.scaling_factor is None:
        raise ModelError(f"{path}: vae/config.json must set scaling_factor and shift_factor")
    if vae.latent_channels != channels:
        raise ModelError(
            f"{path}: VAE and transformer must have the same number of latent channels, got "
            f"{vae.latent_channels} and {channels}"
        )


def pipeline_sigmas(
    scheduler: Any,
    steps: int,
    *,
    tokens: int,
    device: torch.device,
    levels: Callable[[int], Sequence[float]] | None,
    mu: Callable[[int, int], float],
) -> Tensor:
    """Return the noise levels [S+1] that a pipeline's scheduler would use, float32 on the device,
    ending in 0.

    ``mu(steps, tokens of the image)`` is the shift if the scheduler's config asks for one by
    resolution. ``levels(steps)`` are shifted, such as ``linspace(1, 1/S, S)`` of FluxPipeline;
    without it the scheduler spreads the steps over its own table. Raise ConfigError for fewer
    steps than one, or than the scheduler can spread.
    """
    if steps < 1:
        raise ConfigError(f"steps: expected at least 1, got {steps}")

    config = scheduler.config
    shift = mu(steps, tokens) if config.use_dynamic_shifting else None

    # One step has no other grid; diffusers would divide by zero to end it at the terminal level.
    if steps == 1 and config.get("shift_terminal"):
        return torch.tensor([1.0, 0.0], device=device)

    # set_timesteps writes into the scheduler; the pipeline's own must not change under a user who
    # is sampling.
    scheduler = copy.deepcopy(scheduler)
    even = None if levels is None else levels(steps)
    scheduler.set_timesteps(steps, device=device, sigmas=even, mu=shift)
    sigmas: Tensor = scheduler.sigmas
    if not bool(sigmas.isfinite().all()):
        raise ConfigError(
            f"steps: the model's scheduler makes noise levels that are no numbers of {steps} steps "
            f"and {tokens} tokens; ask for more steps or a smaller image"
        )
    if not bool((sigmas.diff() < 0).all()):
        raise ConfigError(
            f"steps: of {steps} steps the model's scheduler makes some without length, its noise "
            "levels do not fall at each; ask for fewer steps"
        )
    return sigmas.to(device, torch.float32)


def first_order(scheduler: Any) -> Any:
    """Return a scheduler of the same grid and times whose steps are Euler's: UniPC of order 1
    without its corrector."""
    if not isinstance(scheduler, UniPCMultistepScheduler):
        return scheduler
    every = list(range(int(scheduler.config.num_train_timesteps)))
    return type(scheduler).from_config(scheduler.config, solver_order=1, disable_corrector=every)


class SquareTokenModel(FlowMatchingModel[Options]):
    """A FlowModel with latents [C,h,w], whose network takes them as squares of 2 x 2."""

    even_steps = True

    def _token_side(self) -> int:
        return PATCH


def pack(x: Tensor) -> Tensor:
    """Return the tokens [B, (h/2)(w/2), 4C] of latents [B,C,h,w]: squares of 2 x 2, row by row."""
    return pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2).contiguous()


def unpack(tokens: Tensor, rows: int) -> Tensor:
    """Return the latents [B,C,2 rows,w] of tokens [B,N,4C]; the inverse of `pack`."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, -1)), PATCH)


def grid_positions(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return all positions of a grid, the last axis running fastest -> [product of sizes, axes].

    **Differs:** float32 always; the pipelines' bfloat16 cannot count beyond 256 (with FLUX, images
    of over 4096 pixels).
    """
    sides = [torch.arange(size, device=device, dtype=torch.float32) for size in sizes]
    return torch.cartesian_prod(*sides)
