"""Tokens that are squares of 2 x 2 latents: the layout of FLUX, Qwen-Image and Z-Image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from flowrl.models.adapter import Options, check_size
from flowrl.models.flow_matching import FlowMatchingModel

PATCH = 2  # a token is a square of 2 x 2 latents


class SquareTokenModel(FlowMatchingModel[Options]):
    """A FlowModel with latents [C,h,w], whose network takes them as squares of 2 x 2."""

    even_steps = True
    packed = True  # the network takes a square's latents as channels: 4 C of them

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return [C, h, w] of the latents of an image of ``height`` x ``width`` pixels. Raise
        ModelError.

        **Differs:** the pipelines of FLUX and Qwen-Image round a size that does not fit down, with
        a line in their log.
        """
        factor = self._pipeline.vae_scale_factor
        check_size(height, width, unit=PATCH * factor)
        channels = int(self.network.config.in_channels)
        return channels // PATCH**2 if self.packed else channels, height // factor, width // factor

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
