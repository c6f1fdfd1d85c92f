"""Wan 2.1 text-to-video as a FlowModel, over the public diffusers WanPipeline."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from pydantic import Field, FiniteFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from flowrl.core.errors import ModelError
from flowrl.core.types import Cond
from flowrl.models.adapter import check_size
from flowrl.models.flow_matching import FlowMatchingModel
from flowrl.models.loading import T5_TOKENIZER, Part
from flowrl.models.options import (
    STRICT,
    DecodeBatch,
    Guidance,
    PipelineOptions,
    T5Tokens,
    options_of,
)
from flowrl.models.pipeline import TunedPipeline, load
from flowrl.models.tuning import tuning_of

PARTS = {
    "transformer": Part(("WanTransformer3DModel",)),
    "scheduler": Part(("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")),
    "vae": Part(("AutoencoderKLWan",)),
    "text_encoder": Part(("UMT5EncoderModel",)),
    "tokenizer": Part(T5_TOKENIZER),
}
WIDE = ("vae",)  # parts that stay in float32, as in the model cards
TARGETS = (  # of LoRA: both attentions, to the video and to the text, and the feed-forward
    *(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
)
UNIT = 16  # pixels: what the pipeline allows a video's sides to be multiples of
TRUNCATION = 1e-4  # of a timestep; float32 keeps a thousand of them to 3e-5
Frames = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WanOptions(PipelineOptions):
    """The options of `wan`."""

    frames: Frames = 81  # of a video: 1 and a multiple of the VAE's factor, 4; 1 makes images
    guidance: Guidance = 1.0  # above 1: classifier-free guidance, as in the pipeline
    negative_prompt: str = ""
    max_sequence_length: T5Tokens = 512
    # of the scheduler: 3 for 480p, 5 for 720p; None: what its file says
    flow_shift: Annotated[FiniteFloat, Field(gt=0)] | None = None
    decode_batch: DecodeBatch = 1

    @property
    def cfg_scale(self) -> float:
        """Return the scale of classifier-free guidance."""
        return self.guidance


@options_of(WanOptions)
def wan(options: WanOptions) -> Wan:
    """Load a Wan pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `WanOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model, or a number of frames that its VAE cannot take.
    """
    tuning = tuning_of(options, TARGETS)
    loaded = load(WanPipeline, options.path, PARTS, tuning, wide=WIDE)
    check_pipeline(loaded.pipeline, options)
    tuned = TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length)
    return Wan(tuned, options)


class Wan(FlowMatchingModel[WanOptions]):
    """A FlowModel around one WanPipeline.

    Latents are [C,t,h,w] with t = (frames - 1) / 4 + 1, and `decode` gives videos [B,T,3,H,W]; of
    one frame, images [B,3,H,W]. Conditioning is UMT5's ``embeds`` [G,T,D], zero after a prompt's
    last token. With UniPC, Wan's own scheduler, the grid starts at 0.999999, and the network is
    told whole timesteps. **Differs:** the pipeline takes UniPC's steps of second order over that
    grid; flowrl takes Euler steps, or those that a plan says. The pipeline calls the network twice
    under guidance; here the halves are one batch.
    """

    @property
    def frames(self) -> int:
        """Return how many frames a video has; 1: the model makes images."""
        return self.options.frames

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return [C, t, h, w] of the latents of a video of ``height`` x ``width`` pixels. Raise
        ModelError.

        **Differs:** the pipeline rounds a size or a number of frames that does not fit, with a
        line in its log.
        """
        vae, patch = self._pipeline.vae.config, self.network.config.patch_size
        factor = int(vae.scale_factor_spatial)
        for side in patch[1:]:
            check_size(height, width, unit=UNIT)
            check_size(height, width, unit=factor * side)
        moments = (self.frames - 1) // int(vae.scale_factor_temporal) + 1
        return int(vae.z_dim), moments, height // factor, width // factor

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B]: as the scheduler would give it.

        UniPC cuts its timesteps off to whole numbers. It does so in float64, where 1000 sigma may
        lie just below a whole number that it should be; here such a one counts as whole.
        """
        scheduler = self._pipeline.scheduler
        scale = scheduler.config.num_train_timesteps
        if isinstance(scheduler, UniPCMultistepScheduler):
            return (sigma.to(self.device).double() * scale + TRUNCATION).long()
        return sigma.to(self.device, torch.float32) * scale

    def latents(self, images: Tensor) -> Tensor:
        """Return latents [B,C,t,h,w], float32 at level 0, of videos [B,T,3,H,W], or images
        [B,3,H,W], in [0,1]: the mode of the VAE's posterior, ``decode_batch`` at a time."""
        videos = images if images.ndim == 5 else images[:, None]
        with self._tuned.vae_at_work(), torch.no_grad():
            vae, found = self._pipeline.vae, []
            mean, std = self._scale(torch.float32)
            for part in videos.split(self.options.decode_batch):
                pixels = (2 * part - 1).transpose(1, 2).to(vae.device, vae.dtype)
                found.append((vae.encode(pixels).latent_dist.mode().float() - mean) / std)
            return torch.cat(found).to(self.device)

    def _decode(self, x0: Tensor) -> Tensor:
        vae, processor = self._pipeline.vae, self._pipeline.video_processor
        # the scale and its inverse as the pipeline rounds them
        mean, std = self._scale(vae.dtype)
        videos = []
        for part in x0.split(self.options.decode_batch):
            latents = part.to(vae.device, vae.dtype) / (1.0 / std) + mean
            video = vae.decode(latents, return_dict=False)[0]
            videos.append(processor.postprocess_video(video, output_type="pt"))
        frames = torch.cat(videos).float()
        return frames[:, 0] if self.frames == 1 else frames

    def _scale(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return mean and std of the VAE's latents [C,1,1,1]."""
        vae = self._pipeline.vae
        both = (vae.config.latents_mean, vae.config.latents_std)
        mean, std = (torch.tensor(values)[:, None, None, None] for values in both)
        return mean.to(vae.device, dtype), std.to(vae.device, dtype)

    def _tokens(self, height: int, width: int) -> int:
        sizes, patch = self.latent_shape(height, width)[1:], self.network.config.patch_size
        moments, rows, columns = (size // part for size, part in zip(sizes, patch, strict=True))
        return moments * rows * columns

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        named = {
            "hidden_states": x.to(self.dtype),
            "timestep": self.time(sigma),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
        }
        return self._tuned.call(named=named)

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _ = self._pipeline.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.options.max_sequence_length,
            device=self.device,
        )
        return {"embeds": embeds[0]}


def check_pipeline(pipeline: Any, options: WanOptions) -> None:
    """Give the scheduler the options' shift. Raise ModelError where the settings contradict what
    `Wan` promises, or where the VAE cannot take so many frames."""
    vae, network, path = pipeline.vae.config, pipeline.transformer.config, options.path
    _check_frames(options.frames, int(vae.scale_factor_temporal))
    if vae.z_dim != network.in_channels or network.out_channels != network.in_channels:
        raise ModelError(
            f"{path}: VAE and transformer must have the same number of latent channels, got "
            f"{vae.z_dim}, and {network.in_channels} in and {network.out_channels} out"
        )
    scheduler = pipeline.scheduler
    unipc = isinstance(scheduler, UniPCMultistepScheduler)
    if options.flow_shift is not None:
        name = "flow_shift" if unipc else "shift"
        scheduler = type(scheduler).from_config(scheduler.config, **{name: options.flow_shift})
        pipeline.register_modules(scheduler=scheduler)
    config = scheduler.config
    flow = config.prediction_type == "flow_prediction" and config.use_flow_sigmas if unipc else True
    other = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
    wrong = [name for name in (*other, "stochastic_sampling") if config.get(name)]
    if not flow or wrong:
        found = f"with {', '.join(wrong)}" if wrong else f"that predicts {config.prediction_type}"
        raise ModelError(
            f"{path}/scheduler: expected UniPC with flow_prediction and use_flow_sigmas, or the "
            f"plain flow-matching Euler one, got one {found}"
        )


def _check_frames(frames: int, factor: int) -> None:
    if (frames - 1) % factor:
        low = (frames - 1) // factor * factor + 1
        raise ModelError(
            f"model.frames: the VAE takes 1 and a multiple of {factor} frames, got {frames}; take "
            f"{low} or {low + factor}"
        )


def first_order(scheduler: Any) -> Any:
    """Return a scheduler of the same grid and times whose steps are Euler's: UniPC of order 1
    without its corrector."""
    if not isinstance(scheduler, UniPCMultistepScheduler):
        return scheduler
    every = list(range(int(scheduler.config.num_train_timesteps)))
    return type(scheduler).from_config(scheduler.config, solver_order=1, disable_corrector=every)
