"""The time of a noisy state as a vector, for rewards that judge unfinished images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SINES = 256


class Clock(nn.Module):
    """A time in [0, 1000) -> a vector [B, D]: cosines and sines, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SINES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        """time [B] -> [B, D]."""
        half = torch.arange(SINES // 2, device=time.device)
        speed = torch.exp(-math.log(10000.0) * half / (SINES // 2))
        angle = time.float()[:, None] * speed
        waves = torch.cat([angle.cos(), angle.sin()], 1)
        first = next(self.layers.parameters())
        made: Tensor = self.layers(waves.to(first.dtype))
        return made
