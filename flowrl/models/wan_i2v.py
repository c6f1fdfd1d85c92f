"""Wan 2.1 and 2.2 image-to-video as a FlowModel, over the public diffusers
WanImageToVideoPipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.pixels import to_bytes
from flowrl.core.types import Cond, Source
from flowrl.models.files.loading import PipelinePart
from flowrl.models.options import Parts, options_of, pick_tuning
from flowrl.models.prompt_encoding import NEGATIVE, stacked
from flowrl.models.tuned_pipeline import load_for_tuning
from flowrl.models.wan import (
    LOW,
    PARTS,
    WIDE,
    Wan,
    WanFacts,
    WanOptions,
    check_pipeline,
    tuned_wan,
)

IMAGE_ENCODER = "image_encoder"  # of Wan 2.1; 2.2 sees the image through the VAE alone
# the released class, and the one that diffusers' own example loads: the hidden states are the same
CLIP_VISION = ("CLIPVisionModelWithProjection", "CLIPVisionModel")
TINY = 1e-6  # the least sigma that is divided by
WORDS = 512  # tokens of text that the network's attention counts on beside those of an image


class WanI2VFacts(WanFacts):
    """What is known of all models that `wan_i2v` reads."""

    pipeline = "WanImageToVideoPipeline"
    typical = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
    wide = (*WIDE, IMAGE_ENCODER)
    sources = "always"
    tiny = {
        "wan_i2v": {},
        "wan2.2_i2v": {},
    }

    def tiny_for(self, parts: Parts) -> str:
        """Return the name of the tiny pipeline that is most like a model."""
        return "wan2.2_i2v" if LOW in parts else "wan_i2v"


FACTS = WanI2VFacts()


@options_of(WanOptions, FACTS)
def wan_i2v(options: WanOptions) -> WanI2V:
    """Load a Wan image-to-video pipeline from a folder or a Hugging Face id, ready to sample and to
    train.

    See `WanOptions` for what can be set. Raise ConfigError for a wrong option, ModelError for a
    wrong model, or a number of frames that its VAE cannot take.
    """
    # only Wan 2.1 sees the frame by CLIP, too
    parts = PARTS | {IMAGE_ENCODER: PipelinePart(CLIP_VISION, optional=True)}
    tuning, wide = pick_tuning(options, FACTS.targets), FACTS.wide
    loaded = load_for_tuning(
        WanImageToVideoPipeline,
        options.path,
        parts,
        tuning,
        wide=wide,
        also=(LOW,),
        also_from=("WanPipeline",),  # of Wan 2.2 TI2V-5B, which has one file for both
    )
    pipeline = loaded.pipeline
    # in Wan 2.2 TI2V-5B the frame is the first moment of x; elsewhere it has channels of its own
    held = bool(pipeline.config.expand_timesteps)
    check_pipeline(pipeline, options, given=not held)
    if held:
        _check_held(options)
        return WanTI2V(tuned_wan(loaded, tuning, options), options)
    if pipeline.image_encoder is not None and options.max_sequence_length != WORDS:
        raise ConfigError(
            f"max_sequence_length: the attention of {options.path} counts on {WORDS} tokens, got "
            f"{options.max_sequence_length}"
        )
    return WanI2V(tuned_wan(loaded, tuning, options), options)


class WanI2V(Wan):
    """A FlowModel around one WanImageToVideoPipeline: a prompt's source is its first frame.

    Beside what `Wan` has, conditioning is ``start`` [G,4+C,t,h,w], which frames are given and the
    VAE's latents of these followed by grey, and with Wan 2.1 ``image`` [G,N,D], CLIP's last hidden
    states but one. Both are the same without the prompt. **Differs:** the pipeline takes one image
    for all of its prompts; here each has its own.
    """

    facts = FACTS

    most_sources = 1

    def encode(self, prompts: list[str]) -> Cond:
        """Raise DataError: a video starts from an image."""
        raise DataError(
            f"encode: {self.options.path} makes videos from an image, but no prompt has a source; "
            "name one in each record, or take a text-to-video model with fn wan"
        )

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Return the prompts' embeddings and what their videos start from {name: [G, ...]}; each
        source is one image [3,H,W] in [0,1] of the video's size. Raise DataError."""
        images = stacked(prompts, sources, self.most_sources)[:, 0]
        cond = Wan.encode(self, prompts)
        more = {"start": torch.cat([self._start(image) for image in images])}
        if self._pipeline.image_encoder is not None:
            more["image"] = torch.cat([self._seen(image) for image in images])
        cond |= more
        if self.guided:
            cond |= {NEGATIVE + name: rows for name, rows in more.items()}
        return cond

    @torch.no_grad()
    def _start(self, image: Tensor) -> Tensor:
        """Return which frames are given, and the latents of the given one [1,4+C,t,h,w]."""
        vae = self._pipeline.vae
        factor = int(vae.config.scale_factor_temporal)
        with self._tuned.at_work("vae"):
            pixels = (2 * image - 1).to(vae.device, vae.dtype)
            video = pixels.new_zeros(1, 3, self.frames, *pixels.shape[1:])
            video[0, :, 0] = pixels
            mode = vae.encode(video).latent_dist.mode().to(self.device, torch.float32)
        mean, std = (one.to(self.device) for one in self._scale(torch.float32))
        latents = (mode - mean) * (1.0 / std)
        given = latents.new_zeros(1, factor, *latents.shape[2:])
        given[:, :, 0] = 1
        return torch.cat([given, latents], 1)

    @torch.no_grad()
    def _seen(self, image: Tensor) -> Tensor:
        """Return what CLIP sees in an image [1,N,D]."""
        with self._tuned.at_work(IMAGE_ENCODER):
            pixels = to_pil_image(to_bytes(image.cpu()))
            seen: Tensor = self._pipeline.encode_image(pixels, self.device)
        return seen.to(self.dtype)

    def _inputs(self, x: Tensor, cond: Cond) -> dict[str, Any]:
        image = cond.get("image")
        return {
            "hidden_states": torch.cat([x, cond["start"]], 1).to(self.dtype),
            "encoder_hidden_states_image": None if image is None else image.to(self.dtype),
        }


class WanTI2V(WanI2V):
    """Wan 2.2 TI2V-5B from an image: the source is the first moment of the latents.

    Conditioning is ``start`` [G,C,1,h,w], the VAE's latents of the source. The network is given
    them in place of the first moment of x, at the time 0, all other tokens at the time of sigma.
    What the network says of the first moment counts for nothing: its velocity is that of the
    straight way to the source, (x - start) / sigma, so that at sigma 0 the source is there. No
    weight has a part in it, so the ratio of its draws is 1.

    **Differs:** the pipeline steps on there by what the network says, and puts the source's latents
    in its place at the end.
    """

    unlike_pipeline = "the pipeline puts the source in its place at the end alone, not at each step"

    @torch.no_grad()
    def _start(self, image: Tensor) -> Tensor:
        """Return the latents of a source [1,C,1,h,w]."""
        return self.latents(image[None, None])

    def _times(self, time: Tensor, x: Tensor) -> Tensor:
        times = super()._times(time, x)
        moment = torch.arange(x.shape[2], device=x.device).repeat_interleave(
            times.shape[1] // x.shape[2]
        )
        return times * (moment > 0)

    def _inputs(self, x: Tensor, cond: Cond) -> dict[str, Any]:
        given = torch.cat([cond["start"].to(x.dtype), x[:, :, 1:]], 2)
        return {"hidden_states": given.to(self.dtype)}

    def _network(self, x: Tensor, sigma: Tensor, cond: Cond, *, expert: str = "") -> Tensor:
        v = super()._network(x, sigma, cond, expert=expert)
        left = sigma.to(x.device, torch.float32).clamp_min(TINY).view(-1, 1, 1, 1, 1)
        way = (x[:, :, :1].float() - cond["start"]) / left
        return torch.cat([way.to(v.dtype), v[:, :, 1:]], 2)


def _check_held(options: WanOptions) -> None:
    """Raise ConfigError for a video without anything beside the source."""
    if options.frames == 1:
        raise ConfigError(
            f"model.frames: {options.path} holds the source as the first frame, got 1 frame, which "
            "leaves nothing to make; take 5 or more"
        )
