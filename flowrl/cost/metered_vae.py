"""A VAE that has no numbers and takes as much memory as was measured of one call."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from torch import Tensor

from flowrl.core.pixels import round_8bit
from flowrl.cost.meter import Meter
from flowrl.models.adapter import decode_latents


class MeteredVAE:
    """Stand in for a VAE: its memory of `peak` bytes per image was measured, and its images
    [3, H, W], or [3, T, H, W] of videos, have no numbers."""

    def __init__(self, meter: Meter, peak: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.meter, self.peak, self.shape, self.dtype = meter, peak, shape, dtype

    def decode(self, latents: Tensor, *, return_dict: bool) -> tuple[Tensor]:
        self.meter.spike(self.peak * len(latents))
        return (torch.empty(len(latents), *self.shape, device="meta", dtype=self.dtype),)


def decode_videos(vae: MeteredVAE, x0: Tensor, batch: int) -> Tensor:
    """Decode latents [B, C, t, h, w] as Wan's adapter does -> [B, T, 3, H, W] float32."""
    processor = VideoProcessor(vae_scale_factor=8)
    videos = []
    for part in x0.split(batch):
        video = vae.decode(part.to(vae.dtype) / 2 + 1, return_dict=False)[0]
        videos.append(processor.postprocess_video(video, output_type="pt"))
    return torch.cat(videos).float()


def decode_rounded_images(vae: MeteredVAE, x0: Tensor, batch: int, scale: int) -> Tensor:
    """Decode latents [B, C, h, w] as adapters of images do, and round them to 8-bit steps -> [B,
    *vae.shape] float32. The latents are still held while the images are rounded."""
    latents = x0.to(vae.dtype) / 2 + 1  # any scale and shift
    processor = VaeImageProcessor(vae_scale_factor=scale)
    pipeline = SimpleNamespace(vae=vae, image_processor=processor)
    return round_8bit(decode_latents(pipeline, latents, batch=batch))
