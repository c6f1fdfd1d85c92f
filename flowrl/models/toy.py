"""Velocity fields that are known in closed form or train in milliseconds, for tests and for reading
the code."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

from flowrl.core.noise_path import linear_grid, per_sample
from flowrl.core.types import Cond

TEXT = 4  # length of a prompt's vector
PATCH = 8  # pixels per latent


class GaussianFlow:
    """The exact velocity for data ``N(mean, variance)``, independent in every dimension. Nothing to
    train."""

    def __init__(
        self, *, mean: float = 0.0, variance: float = 1.0, shift: float = 3.0, channels: int = 3
    ) -> None:
        self.mean, self.variance, self.shift, self.channels = mean, variance, shift, channels

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the grid ``S(linspace(1, 0, steps + 1); shift)`` [steps+1]."""
        return linear_grid(steps, self.shift)

    def encode(self, prompts: list[str]) -> Cond:
        """Return {"text": [G, 4]}, random vectors that depend on the words only."""
        return word_vectors(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return ``E[eps - x0 | x]``, linear in x since all is Gaussian -> [B, *]."""
        s = per_sample(sigma, x)
        total = (1 - s).square() * self.variance + s.square()
        return (s - (1 - s) * self.variance) / total * (x - (1 - s) * self.mean) - self.mean

    def decode(self, x0: Tensor) -> Tensor:
        """Map [B, C, h, w] in [-1, 1] to images [B, 3, 8h, 8w] in [0, 1]."""
        return decode(x0)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return (channels, height / 8, width / 8)."""
        return (self.channels, height // PATCH, width // PATCH)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return nothing: the field is exact."""
        return {}


class LinearFlow(nn.Module):
    """A small trainable field, linear in the latent's channels, the prompt's vector and sigma."""

    def __init__(
        self, *, channels: int = 3, shift: float = 3.0, seed: int = 0, scale: float = 0.1
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.channels, self.shift = channels, shift
        self.mix = nn.Parameter(scale * torch.randn(channels, channels, generator=generator))
        self.text = nn.Parameter(scale * torch.randn(channels, TEXT, generator=generator))
        self.time = nn.Parameter(scale * torch.randn(channels, generator=generator))

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the grid ``S(linspace(1, 0, steps + 1); shift)`` [steps+1]."""
        return linear_grid(steps, self.shift)

    def encode(self, prompts: list[str]) -> Cond:
        """Return {"text": [G, 4]}, random vectors that depend on the words only."""
        return word_vectors(prompts, self.mix.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return ``mix x + text cond + time sigma`` [B, C, ...] in the parameters' dtype."""
        x, sigma, text = (t.to(self.mix.dtype) for t in (x, sigma, cond["text"]))
        offset = text @ self.text.T + sigma[:, None] * self.time
        return torch.einsum("dc,bc...->bd...", self.mix, x) + offset.reshape(
            *offset.shape, *[1] * (x.dim() - 2)
        )

    def decode(self, x0: Tensor) -> Tensor:
        """Map [B, C, h, w] in [-1, 1] to images [B, 3, 8h, 8w] in [0, 1]."""
        return decode(x0)

    def latents(self, images: Tensor) -> Tensor:
        """Map images [B, 3, 8h, 8w] in [0, 1] back to [B, C, h, w], for two or three channels."""
        return avg_pool2d(images, PATCH)[:, : self.channels] * 2 - 1

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return (channels, height / 8, width / 8)."""
        return (self.channels, height // PATCH, width // PATCH)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return all three tensors by name."""
        return dict(self.named_parameters())


def word_vectors(prompts: list[str], device: torch.device | str = "cpu") -> Cond:
    """Return {"text": [G, 4]}: standard normal vectors, seeded by each prompt's own words."""

    def vector(prompt: str) -> Tensor:
        seed = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=7).digest())
        return torch.randn(TEXT, generator=torch.Generator().manual_seed(seed))

    return {"text": torch.stack([vector(prompt) for prompt in prompts]).to(device)}


def decode(x0: Tensor) -> Tensor:
    """Show the first three channels of [B, C, h, w] (repeated if there are fewer) -> [B, 3, 8h, 8w]
    in [0, 1]."""
    rgb = x0.float().repeat(1, 3, 1, 1)[:, :3] if x0.shape[1] < 3 else x0[:, :3].float()
    return interpolate((rgb * 0.5 + 0.5).clamp(0, 1), scale_factor=PATCH, mode="nearest")
