"""A FlowModel around diffusers' UNet pipelines, which predict noise (or v) on a variance-preserving path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError, ModelError
from flowrl.flow import vp_from_flow
from flowrl.models.core import Core, load
from flowrl.models.flow_pipeline import check_decode_batch, check_guidance, check_size, guided, pictures
from flowrl.models.loading import Loaded, Part
from flowrl.models.texts import NEGATIVE
from flowrl.models.tuning import Tuning
from flowrl.models.vp import SCHEDULERS, SPACINGS, Schedule, ddim_scheduler
from flowrl.types import Cond

CLIP = ("CLIPTokenizer", "CLIPTokenizerFast")
PARTS = {
    "unet": Part(("UNet2DConditionModel",)),
    "scheduler": Part(SCHEDULERS),
    "vae": Part(("AutoencoderKL",)),
    "text_encoder": Part(("CLIPTextModel",)),
    "tokenizer": Part(CLIP),
}


class Options(NamedTuple):
    """What a run chooses about a UNet pipeline besides what is trained."""

    guidance: float
    guidance_rescale: float
    negative_prompt: str | None  # None: no prompt at all, the embeddings are zeros
    spacing: str | None
    decode_batch: int

    @property
    def guided(self) -> bool:
        """Tell whether there are two branches, as the pipelines' do_classifier_free_guidance."""
        return self.guidance > 1


class Kind(NamedTuple):
    """What sets one UNet pipeline apart from another."""

    text: Callable[[Any, str, torch.device], dict[str, Tensor]]  # pipeline, prompt -> embeddings without a batch
    added: Callable[[Tensor, Cond], dict[str, Tensor] | None]  # x [B,C,h,w], cond -> the UNet's added_cond_kwargs
    upcasts: bool  # decode in float32 where the VAE is in float16 and its config asks for it


class UNetFlow:
    """A FlowModel around one UNet pipeline; see the FlowModel protocol for the contract.

    x is the pipeline's latent over ``alpha + s``, so that noise of std 1 in the pipeline has here, at the first level
    sigma, the std ``hypot(1 - sigma, sigma)`` that the rollout engine gives it.
    """

    def __init__(self, core: Core, kind: Kind, options: Options) -> None:
        self.options = options
        self.dtype = core.tuning.dtype
        self.autocast = core.tuning.autocast  # float32 master weights, arithmetic in dtype
        self._kind = kind
        self._core = core
        self._pipeline = core.pipeline
        self._schedule = Schedule(core.pipeline.scheduler, self.device)

    @property
    def unet(self) -> Any:
        """Return the network that is trained."""
        return self._pipeline.unet

    @property
    def device(self) -> torch.device:
        """Return where the network runs."""
        return self._core.device

    def pipeline(self) -> Any:  # diffusers does not declare its pipelines' parts as attributes
        """Return the pipeline with the current weights (shared, not copied); its scheduler is DDIM.

        After ``tune="full"`` in a short dtype, call it under ``torch.autocast``: its UNet is float32. With ``offload``
        its text encoders and VAE are on the CPU.
        """
        return self._core.whole()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the UNet, in module order."""
        return self._core.trainable()

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of a picture of ``height`` x ``width`` pixels. Raise ModelError."""
        factor = self._pipeline.vae_scale_factor
        check_size(height, width, unit=max(8, factor))  # the pipelines ask for 8 whatever their VAE
        return int(self.unet.config.in_channels), height // factor, width // factor

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the noise levels [S+1] of the pipeline's DDIM timesteps, float32 on the model's device.

        The first is below 1 (0.93 and less for Stable Diffusion) unless the schedule has zero terminal SNR; the last is
        above 0 without ``set_alpha_to_one``. See `Schedule.grid`.
        """
        self.latent_shape(height, width)
        return self._schedule.grid(steps)

    def encode(self, prompts: list[str]) -> Cond:
        """Return the prompts' embeddings {name: [G, ...]} on the device, and ``negative_<name>`` under guidance."""
        negative = self.options.negative_prompt if self.options.guided else None
        cond = self._core.encode(prompts, self._text, negative=negative)
        if self.options.guided and negative is None:
            cond |= {NEGATIVE + name: torch.zeros_like(rows) for name, rows in cond.items()}
        return cond

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B,C,h,w], of x [B,C,h,w] at sigma [B].

        The network's guided output u + guidance (c - u) comes from one batch (u, c), and both are trained.
        Raise ModelError for a sigma that is no training timestep's; on an accelerator such a row becomes NaN instead,
        because to look at it would make the device wait.
        **Differs:** u and c are mixed in float32; the pipeline mixes them in the UNet's dtype.
        """
        sigma = sigma.to(x.device)
        known = self._schedule.timesteps(sigma)[1]
        if x.device.type == "cpu" and not bool(known.all()):
            raise ModelError(
                f"velocity: expected noise levels of the model's {len(self._schedule.sigma)} training timesteps, as"
                f" `sigmas` gives them, got {float(sigma[~known][0])}: a UNet knows no time in between"
            )
        x_vp = vp_from_flow(x, sigma)
        if self.options.guided:
            scale, rescale = self.options.guidance, self.options.guidance_rescale
            out = guided(self._network, scale, x_vp, sigma, cond, rescale=rescale)
        else:
            out = self._network(x_vp, sigma, cond)
        out = out.masked_fill(~known[:, None, None, None], torch.nan)
        return self._schedule.velocity(x, out, sigma)

    def decode(self, x0: Tensor) -> Tensor:
        """Return pictures [B,3,H,W], float32 in [0,1], of x [B,C,h,w] at the grid's last level."""
        with self._core.vae_at_work():
            return self._decode(x0)

    def _decode(self, x0: Tensor) -> Tensor:
        vae = self._pipeline.vae
        short = vae.dtype
        upcast = self._kind.upcasts and short == torch.float16 and vae.config.force_upcast
        try:
            if upcast:
                vae.to(torch.float32)
            latents = self._schedule.final(x0).to(vae.device, vae.dtype) / vae.config.scaling_factor
            return pictures(self._pipeline, latents, decode_batch=self.options.decode_batch)
        finally:
            if upcast:
                vae.to(short)

    def _text(self, prompt: str) -> dict[str, Tensor]:
        return self._kind.text(self._pipeline, prompt, self.device)

    def _network(self, x_vp: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        named = {
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "added_cond_kwargs": self._kind.added(x_vp, cond),
        }
        return self._core.call(x_vp.to(self.dtype), self._schedule.timesteps(sigma)[0], named=named)


def check_options(options: Options) -> None:
    """Raise ConfigError before gigabytes are read."""
    guidance, rescale = options.guidance, options.guidance_rescale
    check_guidance(guidance, options.negative_prompt)
    if not 0 <= rescale <= 1:
        raise ConfigError(f"guidance_rescale: expected 0 to 1, got {rescale!r}")
    if rescale and guidance <= 1:
        raise ConfigError(f"guidance_rescale: has no effect unless guidance is above 1, got guidance {guidance!r}")
    if options.spacing is not None and options.spacing not in SPACINGS:
        raise ConfigError(f"spacing: expected {' or '.join(SPACINGS)} or null, got {options.spacing!r}")
    check_decode_batch(options.decode_batch)


def load_unet(
    pipeline_class: Any,
    path: str,
    parts: dict[str, Part],
    *,
    tuning: Tuning,
    spacing: str | None,
    addition: str | None,
    leave_out: tuple[str, ...],
) -> Loaded:
    """Load a UNet pipeline and give it a DDIM scheduler. Raise ModelError.

    ``addition`` is the kind of conditioning besides text tokens that the UNet must have.
    """
    loaded = load(pipeline_class, path, parts, tuning, network="unet", leave_out=leave_out)
    pipeline = loaded.pipeline
    unet, vae = pipeline.unet.config, pipeline.vae.config
    if unet.in_channels != vae.latent_channels or unet.out_channels != vae.latent_channels:
        got = f"{vae.latent_channels}, {unet.in_channels} and {unet.out_channels}"
        raise ModelError(
            f"{path}: VAE and UNet must have the same number of latent channels, in and out, got {got}; a UNet for"
            " inpainting or editing takes more and is not supported"
        )
    if unet.time_cond_proj_dim is not None:
        raise ModelError(f"{path}: the UNet takes guidance as an input (time_cond_proj_dim); this is not supported")
    if unet.addition_embed_type != addition:
        raise ModelError(
            f"{path}: expected a UNet with addition_embed_type {addition!r}, got {unet.addition_embed_type!r}"
        )
    pipeline.scheduler = ddim_scheduler(pipeline.scheduler, path, spacing)
    return loaded
