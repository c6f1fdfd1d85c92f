"""The base of adapters for diffusers' UNet pipelines, which predict noise (or v) on a
variance-preserving path.

Such a network knows ``x_vp = alpha_t x0 + s_t eps`` at whole timesteps t. On the flow path that is
the noise level ``sigma_t = s_t / (alpha_t + s_t)``, and the DDIM step between two timesteps is the
Euler step between their levels. `Schedule` is that view of a training schedule.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from diffusers import DDIMScheduler
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.noise_path import flow_from_vp, per_sample, velocity_from_eps, vp_from_flow
from flowrl.core.types import Cond
from flowrl.models.adapter import PipelineModel, guided
from flowrl.models.files.loading import CLIP_TOKENIZER, Loaded, PipelinePart
from flowrl.models.options import (
    STRICT,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    TextShape,
)
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning
from flowrl.models.tuning import UNET_ATTENTION, Tuning

# Each keeps the training schedule in settings that DDIMScheduler reads; those with a noise scale of
# their own (EDM) or made for distilled networks (LCM) are left out.
SCHEDULERS = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
# theirs shift the training schedule, which DDIM is then given level by level
COGVIDEO = ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")
SPACINGS = ("leading", "trailing")
# What of a scheduler's settings stays: those that say which levels the network was trained on, and
# where sampling ends. Its class' own default counts where the file says nothing, and so does what
# diffusers' pipeline has corrected in an outdated file (steps_offset, clip_sample).
KEPT = (
    *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas"),
    *("prediction_type", "rescale_betas_zero_snr", "steps_offset", "set_alpha_to_one"),
)
# What moves a grid away from training timesteps: the value at which it has no effect. Settings of
# the solver alone, such as solver_order, are not among them: the solver is replaced.
WITHOUT_EFFECT = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_lu_lambdas": False,
    "use_flow_sigmas": False,
    "use_dynamic_shifting": False,
    "shift_terminal": None,
    "sigma_min": None,
    "sigma_max": None,
    "lambda_min_clipped": -math.inf,
    "timestep_type": "discrete",
}
TOLERANCE = (
    1e-6  # a few roundings of float32; the levels of Stable Diffusion lie 2.6e-4 and more apart
)

PARTS = {
    "unet": PipelinePart(("UNet2DConditionModel",)),
    "scheduler": PipelinePart(SCHEDULERS),
    "vae": PipelinePart(("AutoencoderKL",)),
    "text_encoder": PipelinePart(("CLIPTextModel",)),
    "tokenizer": PipelinePart(CLIP_TOKENIZER),
}


class UNetFacts(Facts):
    """What is known of all models with a UNet of diffusers."""

    kind = "UNet2DConditionModel"
    network = "unet"
    discrete_levels = True
    targets = UNET_ATTENTION
    more_tokens = 77  # of CLIP

    def modelspec(self, settings: Mapping[str, Any]) -> str:
        """Return what metadata call the network, by what it reads."""
        wide = {2048: "xl-v1-base", 1024: "v2"}.get(settings["cross_attention_dim"], "v1")
        return f"stable-diffusion-{wide}"

    def unit(self, factor: int, settings: Mapping[str, Any]) -> int:
        """Return the pixels that a side is a multiple of; the pipelines ask for 8 whatever their
        VAE."""
        return max(8, factor)

    def text_shape(self, parts: Parts, given: Mapping[str, Any]) -> TextShape:
        """Return the sizes of one prompt's embeddings; beside pooled text the network takes height
        and width, thrice."""
        settings = parts["unet"]
        added = int(settings.get("projection_class_embeddings_input_dim") or 0)
        sizes = 6 * (settings.get("addition_time_embed_dim") or 0)
        return super().text_shape(parts, given)._replace(pooled=added - sizes)

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given."""
        rows, text = empty.rows, sizes.text
        added = {"text_embeds": empty(rows, text.pooled), "time_ids": empty(rows, 6)}
        return {
            "sample": empty(rows, *sizes.latent),
            "timestep": empty(rows, dtype=torch.int64),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
            "added_cond_kwargs": added if text.pooled else None,
        }


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UNetOptions(PipelineOptions):
    """What adapters of UNets take besides what all do."""

    guidance: Guidance = 1.0  # above 1: classifier-free guidance, as in the pipeline
    guidance_rescale: Annotated[float, Field(ge=0, le=1)] = 0.0  # the pipeline's
    # of the timesteps; None: as the scheduler's config says
    spacing: Literal["leading", "trailing"] | None = None

    @model_validator(mode="after")
    def _check_rescale(self) -> Self:
        if self.guidance_rescale and not self.guided:
            raise ValueError(
                "guidance_rescale: has no effect unless guidance is above 1, got guidance "
                f"{self.guidance!r}"
            )
        return self


Options = TypeVar("Options", bound=UNetOptions)


class UNetModel(PipelineModel[Options]):
    """A FlowModel around one UNet pipeline, whose scheduler becomes DDIM.

    x is the pipeline's latent over ``alpha + s``, so that noise of std 1 in the pipeline has here,
    at the first level sigma, the std ``hypot(1 - sigma, sigma)`` that the rollout engine gives it.
    An adapter writes `_embed` and `_added`.
    """

    # it knows the noise levels of its training timesteps, and none in between
    discrete_levels = True
    # encode and decode in float32 where the VAE is in float16 and its config asks for it
    upcasts = False

    def __init__(self, tuned: TunedPipeline, options: Options) -> None:
        super().__init__(tuned, options)
        self._schedule = Schedule(tuned.pipeline.scheduler, self.device)

    @property
    def unet(self) -> Any:
        """Return the network that is trained."""
        return self.network

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the noise levels [S+1] of the pipeline's DDIM timesteps, float32 on the model's
        device.

        The first is below 1 (0.93 and less for Stable Diffusion) unless the schedule has zero
        terminal SNR; the last is above 0 without ``set_alpha_to_one``. See `Schedule.grid`.
        """
        self.latent_shape(height, width)
        return self._schedule.grid(steps)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B,C,h,w], of x [B,C,h,w] at sigma [B].

        The network's guided output u + guidance (c - u) comes from one batch (u, c), and both are
        trained; see `guided` for how they are mixed. Raise ModelError for a sigma that is no
        training timestep's; on an accelerator such a row becomes NaN instead, because to look at it
        would make the device wait.
        """
        # Does the network know these noise levels?
        sigma = sigma.to(x.device)
        known = self._schedule.timesteps(sigma)[1]
        if x.device.type == "cpu" and not bool(known.all()):
            raise ModelError(
                f"velocity: expected noise levels of the model's {len(self._schedule.sigma)} "
                f"training timesteps, as `sigmas` gives them, got {float(sigma[~known][0])}: a "
                "UNet knows no time in between"
            )

        # Ask it on its own path, with or without guidance.
        x_vp, scale = vp_from_flow(x, sigma), self.options.guidance
        if self.guided:
            out = guided(self._network, scale, x_vp, sigma, cond, finish=self._rescaled)
        else:
            out = self._network(x_vp, sigma, cond)

        # Turn its answer into a velocity of the flow path.
        out = out.masked_fill(~known[:, None, None, None], torch.nan)
        return self._schedule.velocity(x, out, sigma)

    def _rescaled(self, mixed: Tensor, c: Tensor) -> Tensor:
        """Move the std of each row of the mixed output towards that of c (2305.08891 eq. 15-16),
        where the options say so."""
        share = self.options.guidance_rescale
        return rescale_noise_cfg(mixed, c, share) if share else mixed

    @abstractmethod
    def _added(self, x: Tensor, cond: Cond) -> dict[str, Tensor] | None:
        """Return the UNet's added_cond_kwargs for latents x [B,C,h,w]."""

    def _network(self, x_vp: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        named = {
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
            "added_cond_kwargs": self._added(x_vp, cond),
        }
        time = self._schedule.timesteps(sigma)[0]
        return self._tuned.call(x_vp.to(self.dtype), time, named=named)

    def _decode(self, x0: Tensor) -> Tensor:
        vae = self._pipeline.vae
        latents = self._schedule.final(x0).to(vae.device, vae.dtype)
        return self._images(latents / vae.config.scaling_factor)

    @contextmanager
    def _vae_precision(self) -> Iterator[None]:
        vae = self._pipeline.vae
        short = vae.dtype
        upcast = self.upcasts and short == torch.float16 and vae.config.force_upcast
        try:
            if upcast:
                vae.to(torch.float32)
            yield
        finally:
            if upcast:
                vae.to(short)


def load_unet(
    pipeline_class: Any,
    options: UNetOptions,
    parts: dict[str, PipelinePart],
    *,
    tuning: Tuning,
    addition: str | None,
    leave_out: tuple[str, ...],
) -> Loaded:
    """Load a UNet pipeline and give it a DDIM scheduler. Raise ModelError.

    ``addition`` is the kind of conditioning besides text tokens that the UNet must have.
    """
    path = options.path
    loaded = load_for_tuning(
        pipeline_class, path, parts, tuning, network="unet", leave_out=leave_out
    )
    _check_unet(loaded.pipeline, path, addition)
    scheduler = ddim_scheduler(loaded.pipeline.scheduler, path, options.spacing)
    loaded.pipeline.scheduler = scheduler
    return loaded


def _check_unet(pipeline: Any, path: str, addition: str | None) -> None:
    """Raise ModelError for a UNet that takes or gives something else than these adapters do."""
    # noisy latents in, noise out: all in the VAE's channels
    unet, vae = pipeline.unet.config, pipeline.vae.config
    channels = vae.latent_channels, unet.in_channels, unet.out_channels
    if len(set(channels)) > 1:
        raise ModelError(
            f"{path}: VAE and UNet must have the same number of latent channels, in and out, got "
            f"{channels[0]}, {channels[1]} and {channels[2]}; a UNet for inpainting or editing "
            "takes more and is not supported"
        )
    if unet.time_cond_proj_dim is not None:
        raise ModelError(
            f"{path}: the UNet takes guidance as an input (time_cond_proj_dim); this is not "
            "supported"
        )
    # SD and SDXL differ in what else they are told, such as the size of the image
    if unet.addition_embed_type != addition:
        raise ModelError(
            f"{path}: expected a UNet with addition_embed_type {addition!r}, got "
            f"{unet.addition_embed_type!r}"
        )


class Schedule:
    """Noise levels by timestep, and the way back."""

    def __init__(self, scheduler: DDIMScheduler, device: torch.device) -> None:
        """Tabulate a checked scheduler (see `ddim_scheduler`). Raise ModelError if its levels do
        not rise with t."""
        self._scheduler = scheduler
        self.predicts_noise = scheduler.config.prediction_type == "epsilon"
        # flow levels of the timesteps [T], in double precision, since some lie close together
        bar = scheduler.alphas_cumprod.double()
        sigma = flow_from_vp(bar, bar.sqrt(), (1 - bar).sqrt())[1]
        gap = float(sigma.diff().min())
        if not gap >= 4 * TOLERANCE:  # a NaN is no step either
            raise ModelError(
                "scheduler: noise must rise with every training timestep, but one step adds only "
                f"{gap:g}"
            )
        # the levels, and the middles between them, by which a level finds its timestep again
        self.sigma = sigma.float().to(device)  # [T]
        self._between = ((sigma[1:] + sigma[:-1]) / 2).float().to(device)  # [T-1]
        # where the last step ends: 0, or the level of timestep 0
        final = scheduler.final_alpha_cumprod.double()[None]
        level = flow_from_vp(final, final.sqrt(), (1 - final).sqrt())[1]
        self.end = level.float().to(device)  # [1]

    def grid(self, steps: int) -> Tensor:
        """Return the levels [steps+1] of the scheduler's own timesteps, then of its final alpha.

        The last is 0 with ``set_alpha_to_one``, else the level of timestep 0 (0.028 for Stable
        Diffusion). **Differs:** diffusers' DDIM steps from t to ``t - T // steps``. With spacing
        ``trailing`` and a number of steps that does not divide T this is not the timestep at which
        the network is asked next; here it always is. With some numbers of steps, such as 61 of
        1000, diffusers adds a timestep -1, which is none; here it is left out. Raise ConfigError if
        the schedule has not so many timesteps, or the last step no length.
        """
        scheduler = copy.deepcopy(self._scheduler)  # set_timesteps writes into it
        total = len(self.sigma)
        if not 1 <= steps <= total:
            raise ConfigError(
                f"steps: expected 1 to {total}, the timesteps that the model was trained on, got "
                f"{steps}"
            )
        # diffusers spaces the timesteps; an offset can push the first one out of the table
        scheduler.set_timesteps(steps)
        first = int(scheduler.timesteps[0])
        if first >= total:
            raise ConfigError(
                f"steps: with {steps} of them the scheduler (steps_offset "
                f"{scheduler.config.steps_offset}) starts at"
                f" timestep {first}, but the model knows none above {total - 1}; take fewer"
            )
        timesteps = scheduler.timesteps[scheduler.timesteps >= 0].to(self.sigma.device)
        if len(timesteps) != steps:
            raise ConfigError(
                f"steps: of {steps} the scheduler makes {len(timesteps)} timesteps; take another "
                "number"
            )
        if not scheduler.config.set_alpha_to_one and int(timesteps[-1]) == 0:
            raise ConfigError(
                f"steps: the last of {steps} steps has no length, it begins at timestep 0 and the "
                "scheduler ends there (set_alpha_to_one false); in scheduler_config.json set "
                "steps_offset to 1, or set_alpha_to_one to true"
            )
        return torch.cat([self.sigma[timesteps], self.end])

    def timesteps(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return each level's timestep, int64 [B], and whether it is that timestep's level, bool
        [B]."""
        sigma = sigma.to(self.sigma).contiguous()
        t = torch.searchsorted(self._between, sigma)
        return t, (self.sigma[t] - sigma).abs() <= TOLERANCE

    def velocity(self, x: Tensor, out: Tensor, sigma: Tensor) -> Tensor:
        """Turn the network's output [B, *] at the flow latent x [B, *], sigma [B], into ``v = eps -
        x0`` [B, *].

        For v prediction, out = alpha eps - s x0; with x = x_vp / (alpha + s) this is
        ``v = (alpha + s) (out + (s - alpha) x)``, also where alpha = 0.
        """
        if self.predicts_noise:
            return velocity_from_eps(x, out, sigma)
        root = per_sample(torch.hypot(1 - sigma, sigma), x)  # 1 / (alpha + s)
        return (out + (2 * per_sample(sigma, x) - 1) / root * x) / root

    def final(self, x: Tensor) -> Tensor:
        """Return what the pipeline decodes: x [B, *] of the grid's last level in
        variance-preserving coordinates."""
        return vp_from_flow(x, self.end.to(x))


def ddim_scheduler(scheduler: Any, path: str, spacing: str | None) -> DDIMScheduler:
    """Return the DDIM scheduler with a pipeline scheduler's settings and, if given, another
    ``spacing``.

    The noise levels that it knows and where it ends are kept (`KEPT`), its solver is replaced. A
    spacing that the file does not set is DDIM's ``leading``. Raise ModelError where flowrl cannot
    follow the settings.
    """
    where = f"{path}: scheduler/scheduler_config.json"
    _check_effects(scheduler, where)
    changes = _kept(scheduler)
    if spacing is not None:
        changes["timestep_spacing"] = spacing
    chosen = set(scheduler.config) - set(scheduler.config.get("_use_default_values", ()))
    if "clip_sample" not in chosen:
        changes["clip_sample"] = (
            False  # the default of DDIMScheduler is made for pixels, not for latents
        )
    try:
        own = {k: v for k, v in scheduler.config.items() if k != "snr_shift_scale"}
        ddim = DDIMScheduler.from_config(own, **changes)
    except NotImplementedError as error:
        raise ModelError(f"{where}: {error}") from error
    # settings under which DDIM is no Euler step on the flow path
    config = ddim.config
    if config.prediction_type not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"{where}: expected prediction_type 'epsilon' or 'v_prediction', got "
            f"{config.prediction_type!r}"
        )
    if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
        raise ModelError(
            f"{where}: rescale_betas_zero_snr needs prediction_type 'v_prediction', got 'epsilon': "
            "where there is no"
            " signal left, a prediction of the noise says nothing about the image. Correct "
            "whichever is wrong"
        )
    if config.timestep_spacing not in SPACINGS:
        raise ModelError(
            f"{where}: timestep_spacing {config.timestep_spacing!r}: DDIM does not land on its own "
            "timesteps there;"
            " set spacing to 'leading' or 'trailing'"
        )
    if config.clip_sample or config.thresholding:
        raise ModelError(
            f"{where}: clip_sample and thresholding must be false, latents are not within [-1, 1]"
        )
    return ddim


def _own_settings(scheduler: Any) -> dict[str, Any]:
    """Return the settings that a scheduler's class reads; a file may have others beside."""
    known = inspect.signature(type(scheduler).__init__).parameters
    return {name: value for name, value in scheduler.config.items() if name in known}


def _check_effects(scheduler: Any, where: str) -> None:
    """Raise ModelError for settings that put levels between those of the training timesteps."""
    own = _own_settings(scheduler)
    wrong = []
    for name, value in WITHOUT_EFFECT.items():
        if own.get(name, value) != value and own[name] is not None:
            wrong.append(f"{name} {own[name]!r}")
    if wrong:
        raise ModelError(
            f"{where}: {', '.join(wrong)}: the network is sampled at the timesteps that it was "
            f"trained on, not between them; take {'it' if len(wrong) == 1 else 'them'} out of the "
            "file to sample it so"
        )


def _kept(scheduler: Any) -> dict[str, Any]:
    """Return what DDIM takes over: from_config alone would forget the defaults of the scheduler's
    class, and what the pipeline has corrected where the file says nothing."""
    config, own = scheduler.config, _own_settings(scheduler)
    kept = {name: own[name] for name in KEPT if name in own}
    # other classes end at level 0, or say so by another name
    if type(scheduler).__name__ in COGVIDEO:
        bar = scheduler.alphas_cumprod.double()
        before = torch.cat([torch.ones(1, dtype=torch.float64), bar[:-1]])
        kept["trained_betas"] = (1 - bar / before).tolist()
        kept["rescale_betas_zero_snr"] = False  # it is in these already
    if "set_alpha_to_one" not in config:
        kept["set_alpha_to_one"] = own.get("final_sigmas_type", "zero") == "zero"
    return kept
