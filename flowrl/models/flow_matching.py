"""The bases of adapters for networks that predict v on the flow path: SD3, FLUX and their kind.

`SquareTokenModel` is for networks whose tokens are squares of 2 x 2 latents: FLUX, Qwen-Image and
Z-Image.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import Cond
from flowrl.models.adapter import Options, PipelineModel, guided
from flowrl.models.facts import PATCH


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
