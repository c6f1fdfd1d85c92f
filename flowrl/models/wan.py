"""Wan 2.1 and 2.2 text-to-video as a FlowModel, over the public diffusers WanPipeline.

Wan 2.2 has two networks, one for high and one for low noise: `Experts` is one network of both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from math import prod
from typing import Annotated, Any, ClassVar, Self

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from pydantic import Field, FiniteFloat, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.processes import sharded, world
from flowrl.core.types import Cond
from flowrl.models.adapter import FlowMatchingModel, guided
from flowrl.models.files.loading import T5_TOKENIZER, Loaded, PipelinePart
from flowrl.models.options import (
    CALL,
    PATCH,
    STRICT,
    DecodeBatch,
    Empty,
    Facts,
    Guidance,
    Parts,
    PipelineOptions,
    Sizes,
    T5Tokens,
    check_size,
    options_of,
    pick_tuning,
)
from flowrl.models.runtime import context_size
from flowrl.models.tuned_pipeline import TunedPipeline, load_for_tuning
from flowrl.models.tuning import Tuning

PARTS = {
    "transformer": PipelinePart(("WanTransformer3DModel",)),
    "transformer_2": PipelinePart(("WanTransformer3DModel",), optional=True),
    "scheduler": PipelinePart(("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")),
    "vae": PipelinePart(("AutoencoderKLWan",)),
    "text_encoder": PipelinePart(("UMT5EncoderModel",)),
    "tokenizer": PipelinePart(T5_TOKENIZER),
}
WIDE: tuple[str, ...] = ("vae",)  # parts that stay in float32, as in the model cards
SEEN = 257  # tokens of what CLIP sees in the image that a video of Wan 2.1 starts from
TARGETS = (  # of LoRA: both attentions, to the video and to the text, and the feed-forward
    *(f"attn{n}.{name}" for n in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ffn.net.0.proj",
    "ffn.net.2",
)
UNIT = 16  # pixels: what the pipeline allows a video's sides to be multiples of
TRUNCATION = 1e-4  # of a timestep; float32 keeps a thousand of them to 3e-5
Frames = Annotated[int, Field(ge=1)]
HIGH, LOW = "transformer", "transformer_2"  # as the pipeline names them
Ask = Callable[[str, Tensor], Tensor]
"""``ask(expert, rows [b]) -> v [b, *]``: one expert's velocity of some rows of a batch."""


class WanFacts(Facts):
    """What is known of all models that `wan` reads."""

    pipeline = "WanPipeline"
    kind = "WanTransformer3DModel"
    spec = "wan"
    targets = TARGETS
    typical = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    video = True
    wide: ClassVar[tuple[str, ...]] = WIDE
    call = CALL | {"frames": "num_frames", "guidance_2": "guidance_scale_2"}
    tiny = {
        "wan": {},
        "wan2.2": {},
        "wan_ti2v": {},
    }

    def tiny_for(self, parts: Parts) -> str:
        """Return the name of the tiny pipeline that is most like a model: Wan 2.2 has two experts,
        or a VAE of its own."""
        if parts["vae"].get("is_residual"):
            return "wan_ti2v"
        return "wan2.2" if LOW in parts else "wan"

    def latent_shape(
        self, parts: Parts, height: int, width: int, *, frames: int = 1
    ) -> tuple[int, ...]:
        """Return the shape of one latent: the VAE keeps the first frame, and joins some of those
        after it into one."""
        vae = parts["vae"]
        side, time = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
        check_frames(frames, time)
        patch = parts["transformer"].get("patch_size") or (1, PATCH, PATCH)
        for unit in (UNIT, side * patch[1], side * patch[2]):
            check_size(height, width, unit=unit)
        moments = (frames - 1) // time + 1
        return int(vae.get("z_dim", 16)), moments, height // side, width // side

    def inputs(self, empty: Empty, sizes: Sizes, parts: Parts) -> dict[str, Any]:
        """Return what the network is given; from image to video what is given of the frames, too,
        and of TI2V-5B a time for each token."""
        rows, text, settings = empty.rows, sizes.text, parts["transformer"]
        channels, (moments, height, width) = sizes.latent[0], sizes.latent[1:]
        tokens = moments * (height // PATCH) * (width // PATCH)
        times = (rows, tokens) if parts["vae"].get("is_residual") else (rows,)
        found = {
            "hidden_states": empty(
                rows, settings.get("in_channels") or channels, *sizes.latent[1:]
            ),
            "timestep": empty(*times, dtype=torch.float32),
            "encoder_hidden_states": empty(rows, text.tokens, text.width),
        }
        if settings.get("image_dim"):
            found["encoder_hidden_states_image"] = empty(rows, SEEN, settings["image_dim"])
        return found


FACTS = WanFacts()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WanOptions(PipelineOptions):
    """The options of `wan`."""

    frames: Frames = 81  # of a video: 1 and a multiple of the VAE's factor, 4; 1 makes images
    guidance: Guidance = 1.0  # above 1: classifier-free guidance, as in the pipeline
    guidance_2: Guidance | None = None  # of Wan 2.2's second expert; None: as the first
    negative_prompt: str = ""
    max_sequence_length: T5Tokens = 512  # the pipeline's; unmasked zeros fill a prompt up to it
    # of the scheduler: 3 for 480p, 5 for 720p; None: what its file says
    flow_shift: Annotated[FiniteFloat, Field(gt=0)] | None = None
    decode_batch: DecodeBatch = 1
    same_guidance: ClassVar[tuple[str, ...]] = ("guidance_2",)

    @model_validator(mode="after")
    def _check_second(self) -> Self:
        if self.guidance_2 is not None and not self.guided:
            raise ValueError(
                f"guidance_2: has no effect unless guidance is above 1, got guidance "
                f"{self.guidance!r}"
            )
        return self


@options_of(WanOptions, FACTS)
def wan(options: WanOptions) -> Wan:
    """Load a Wan pipeline from a folder or a Hugging Face id, ready to sample and to train.

    See `WanOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model, or a number of frames that its VAE cannot take.
    """
    tuning = pick_tuning(options, TARGETS)
    loaded = load_for_tuning(WanPipeline, options.path, PARTS, tuning, wide=WIDE, also=(LOW,))
    check_pipeline(loaded.pipeline, options)
    return Wan(tuned_wan(loaded, tuning, options), options)


class Wan(FlowMatchingModel[WanOptions]):
    """A FlowModel around one WanPipeline.

    Latents are [C,t,h,w] with t = (frames - 1) / 4 + 1, and `decode` gives videos [B,T,3,H,W]; of
    one frame, images [B,3,H,W]. Conditioning is UMT5's ``embeds`` [G,T,D], zero after a prompt's
    last token. With UniPC, Wan's own scheduler, the grid starts at 0.999999, and the network is
    told whole timesteps. **Differs:** the pipeline takes UniPC's steps of second order over that
    grid; flowrl takes Euler steps, or those that a plan says. The pipeline calls the network twice
    under guidance; here the halves are one batch.

    Of Wan 2.2's two experts the first answers above the boundary, the second below. Both are
    trained, and a batch over the boundary is a call of each.
    """

    facts = FACTS

    @property
    def frames(self) -> int:
        """Return how many frames a video has; 1: the model makes images."""
        return self.options.frames

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one latent; of several processes each has some of its tokens. Raise
        ModelError."""
        found = super().latent_shape(height, width)
        tokens, degree = self._count(found), context_size(self._tuned.tuning.runtime)
        if tokens % degree:
            raise ModelError(
                f"runtime.context_parallel={degree}: expected a divisor of the {tokens} tokens of "
                "a video; take another number of processes, of frames or of pixels"
            )
        return found

    def time(self, sigma: Tensor) -> Tensor:
        """Return the network's time input of sigma [B]: as the scheduler would give it.

        UniPC cuts its timesteps off to whole numbers. It does so in float64, where 1000 sigma may
        lie just below a whole number that it should be; here such a one counts as whole.
        """
        scheduler = self._pipeline.scheduler
        scale = scheduler.config.num_train_timesteps
        if isinstance(scheduler, UniPCMultistepScheduler):
            return (sigma.to(self.device).double() * scale + TRUNCATION).long()
        return self._timesteps(sigma)

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
        return self._count(self.latent_shape(height, width))

    def _count(self, latent: tuple[int, ...]) -> int:
        """Return how many tokens a latent [C, t, h, w] has."""
        sizes = zip(latent[1:], self.network.config.patch_size, strict=True)
        return prod(size // part for size, part in sizes)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B,C,t,h,w], of x [B,C,t,h,w] at sigma [B], each row
        by its own expert."""
        boundary = self._pipeline.config.boundary_ratio
        if boundary is None:
            return super().velocity(x, sigma, cond)
        options, sigma = self.options, sigma.to(x.device)
        # rows [B] that are clean enough for the second expert, which has guidance of its own
        low = self.time(sigma) < boundary * self._pipeline.scheduler.config.num_train_timesteps

        def ask(expert: str, rows: Tensor) -> Tensor:
            network = partial(self._network, expert=expert)
            mine = {name: values[rows] for name, values in cond.items()}
            if not self.guided:
                return network(x[rows], sigma[rows], mine)
            scale = options.guidance
            if expert == LOW and options.guidance_2 is not None:
                scale = options.guidance_2
            x_in, sigma_in = x[rows], sigma[rows]
            return guided(network, scale, x_in, sigma_in, mine, finish=self._guided)

        return by_expert(low.to(x.device), ask)

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond, *, expert: str = "") -> Tensor:
        named: dict[str, Any] = {
            "timestep": self._times(self.time(sigma), x),
            "encoder_hidden_states": cond["embeds"].to(self.dtype),
        }
        if expert:
            named["expert"] = expert
        return self._tuned.call(named=self._inputs(x, cond) | named)

    def _times(self, time: Tensor, x: Tensor) -> Tensor:
        """Return the times [B] as the network is told them: of Wan 2.2 TI2V-5B one for each token
        [B,N], moment by moment."""
        if not self._pipeline.config.expand_timesteps:
            return time
        return time.float()[:, None].expand(-1, self._count(tuple(x.shape[1:])))

    def _inputs(self, x: Tensor, cond: Cond) -> dict[str, Any]:
        """Return what the network is given besides time and text."""
        return {"hidden_states": x.to(self.dtype)}

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        embeds, _ = self._pipeline.encode_prompt(
            [prompt],
            do_classifier_free_guidance=False,
            max_sequence_length=self.options.max_sequence_length,
            device=self.text_device,
        )
        return {"embeds": embeds[0]}


def tuned_wan(loaded: Loaded, tuning: Tuning, options: WanOptions) -> TunedPipeline:
    """Tune a pipeline's network, or both of its experts. Raise ConfigError, ModelError."""
    pipe = loaded.pipeline
    two = check_experts(pipe, options.path)
    if options.guidance_2 is not None and not two:
        raise ConfigError(f"guidance_2: {options.path} has one network, as Wan 2.1; leave it out")
    network = Experts(pipe.transformer, pipe.transformer_2) if two else None
    return TunedPipeline(loaded, tuning, t5_tokens=options.max_sequence_length, joined=network)


def check_pipeline(pipeline: Any, options: WanOptions, *, given: bool = False) -> None:
    """Give the scheduler the options' shift. Raise ModelError where the settings contradict what
    `Wan` promises, or where the VAE cannot take so many frames. ``given``: the network gets latents
    of a given frame, too, and which moments these are."""
    vae, network, path = pipeline.vae.config, pipeline.transformer.config, options.path
    check_frames(options.frames, int(vae.scale_factor_temporal))
    # image to video: the noisy latents, those of the given frame, and a mask of the given moments
    wanted = 2 * vae.z_dim + int(vae.scale_factor_temporal) if given else vae.z_dim
    if (network.in_channels, network.out_channels) != (wanted, vae.z_dim):
        raise ModelError(
            f"{path}: a VAE of {vae.z_dim} latent channels needs a transformer with {wanted} "
            f"channels in and {vae.z_dim} out, got {network.in_channels} and "
            f"{network.out_channels}; text to video is fn wan, image to video fn wan_i2v"
        )
    scheduler = pipeline.scheduler
    unipc = isinstance(scheduler, UniPCMultistepScheduler)
    if options.flow_shift is not None:
        name = "flow_shift" if unipc else "shift"
        scheduler = type(scheduler).from_config(scheduler.config, **{name: options.flow_shift})
        pipeline.register_modules(scheduler=scheduler)
    # other spacings would move the levels away from the grid that is sampled and trained
    config = scheduler.config
    flow = not unipc or (config.prediction_type == "flow_prediction" and config.use_flow_sigmas)
    other = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
    wrong = [name for name in (*other, "stochastic_sampling") if config.get(name)]
    if not flow or wrong:
        found = f"with {', '.join(wrong)}" if wrong else f"that predicts {config.prediction_type}"
        raise ModelError(
            f"{path}/scheduler: expected UniPC with flow_prediction and use_flow_sigmas, or the "
            f"plain flow-matching Euler one, got one {found}"
        )


def check_frames(frames: int, factor: int) -> None:
    """Raise ModelError unless the VAE, which joins ``factor`` frames, takes so many."""
    if (frames - 1) % factor:
        low = (frames - 1) // factor * factor + 1
        raise ModelError(
            f"model.frames: the VAE takes 1 and a multiple of {factor} frames, got {frames}; take "
            f"{low} or {low + factor}"
        )


class Experts(nn.Module):
    """Both networks under the pipeline's names, so that parameters are told apart by name.

    What a network is asked to do when it is tuned and set up, both are. A call names the expert.
    """

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low

    @property
    def both(self) -> tuple[Any, Any]:
        """Return the two networks."""
        return self.transformer, self.transformer_2

    @property
    def config(self) -> Any:
        """Return the settings that both have in common."""
        return self.transformer.config

    @property
    def attn_processors(self) -> dict[str, Any]:
        """Return what computes the attention of each layer of both."""
        found: dict[str, Any] = {}
        for name, network in zip((HIGH, LOW), self.both, strict=True):
            found |= {f"{name}.{key}": one for key, one in network.attn_processors.items()}
        return found

    def forward(self, *, expert: str, **inputs: Any) -> Any:
        """Call one of the networks."""
        return getattr(self, expert)(**inputs)

    def add_adapter(self, config: Any) -> None:
        """Put LoRA on both."""
        for network in self.both:
            network.add_adapter(config)

    def enable_gradient_checkpointing(self, *args: Any) -> None:
        """Let both compute their activations again."""
        for network in self.both:
            network.enable_gradient_checkpointing(*args)

    def set_attention_backend(self, name: str) -> None:
        """Let both attend by a back end."""
        for network in self.both:
            network.set_attention_backend(name)

    def compile_repeated_blocks(self, **how: Any) -> None:
        """Compile the blocks of both."""
        for network in self.both:
            network.compile_repeated_blocks(**how)


def by_expert(low: Tensor, ask: Ask) -> Tensor:
    """Ask each expert about its own rows -> v [B, *]; low [B] bool: which rows are the second's.

    No call straddles the boundary: a batch that does is two calls, put together in its own order.
    Under FSDP the processes ask an expert in step: one without a row for an expert that another
    process asks does so with a spare row, which counts nothing.
    """
    rows = torch.arange(len(low), device=low.device)
    count = int(low.sum())
    mine = {HIGH: rows[~low] if count else rows, LOW: rows[low] if count < len(low) else rows}
    asked = [HIGH] * (count < len(low)) + [LOW] * (count > 0)
    wanted = asked
    if sharded():
        wanted = list(chain.from_iterable(world().gather(asked)))
    found = []
    nothing: Tensor | None = None
    for name in (HIGH, LOW):
        if name in asked:
            found.append(ask(name, mine[name]))
        elif name in wanted:
            nothing = 0 * ask(name, rows[:1]).sum()
    whole = found[0]
    if len(found) > 1:
        whole = torch.cat(found)[torch.cat([*mine.values()]).argsort()]
    return whole if nothing is None else whole + nothing


def check_experts(pipeline: Any, path: str) -> bool:
    """Say whether a pipeline has two experts. Raise ModelError where network and boundary do not
    fit together."""
    # two networks need a level at which one takes over from the other
    second, boundary = getattr(pipeline, LOW, None), pipeline.config.boundary_ratio
    if (second is None) != (boundary is None):
        has = "no transformer_2" if second is None else "a transformer_2"
        raise ModelError(
            f"{path}/model_index.json: expected transformer_2 and boundary_ratio together, as Wan "
            f"2.2 has them, got {has} with boundary_ratio {boundary}"
        )
    if second is None:
        return False
    # the same latents and texts go to both
    one, two = pipeline.transformer.config, second.config
    for name in ("in_channels", "out_channels", "patch_size", "text_dim"):
        if one[name] != two[name]:
            raise ModelError(
                f"{path}/transformer_2/config.json: expected {name} {one[name]} as in transformer, "
                f"got {two[name]}"
            )
    return True
