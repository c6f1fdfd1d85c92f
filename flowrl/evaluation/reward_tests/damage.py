"""Make images worse, and make up images that show nothing: what a reward has to tell from the
real ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad

from flowrl.core.seeds import generator

BLUR = 0.03  # std of the Gaussian, as a share of the shorter side: 2 pixels of 64, 15 of 512
NOISE = 0.2  # std of the pixel noise, of the range [0, 1]


def blur(image: Tensor, seed: int = 0) -> Tensor:
    """Blur an image [3, H, W] by a Gaussian that is cut off at 3 std; the edge is continued.
    `seed` has no effect."""
    std = BLUR * min(image.shape[1:])
    reach = max(1, math.ceil(3 * std))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / std) ** 2)
    kernel = kernel / kernel.sum()
    # [3, 1, H + 2 reach, W + 2 reach]
    wide = pad(image[None], [reach] * 4, mode="replicate").transpose(0, 1)
    return conv2d(conv2d(wide, kernel[None, None, None, :]), kernel[None, None, :, None])[:, 0]


def noise(image: Tensor, seed: int = 0) -> Tensor:
    """Add Gaussian noise to an image [3, H, W] in [0, 1] and cut off what leaves the range."""
    drawn = torch.randn(image.shape, generator=generator(seed, "noise"))
    return (image + NOISE * drawn).clamp(0, 1)


def _static(height: int, width: int, seed: int) -> Tensor:
    return torch.rand(3, height, width, generator=generator(seed, "static"))


def _flat(height: int, width: int, seed: int) -> Tensor:
    return _colour(seed).expand(3, height, width).clone()


def _mosaic(height: int, width: int, seed: int) -> Tensor:
    tiles = torch.rand(1, 3, 8, 8, generator=generator(seed, "mosaic"))
    return interpolate(tiles, size=(height, width), mode="nearest")[0]


def _gradient(height: int, width: int, seed: int) -> Tensor:
    x, y = torch.linspace(-1, 1, width)[None, :], torch.linspace(-1, 1, height)[:, None]
    angle = 2 * math.pi * float(torch.rand(1, generator=generator(seed, "angle")))
    ramp = ((math.cos(angle) * x + math.sin(angle) * y) / (2 * math.sqrt(2)) + 0.5).clamp(0, 1)
    return ramp * _colour(seed)


def _strokes(height: int, width: int, seed: int) -> Tensor:
    """Draw 8 lines of black bars of random width on white, like a page of writing seen from
    afar."""
    bars = torch.rand(8, 32, generator=generator(seed, "strokes")) < 0.6
    lines = torch.ones(32, 32)
    for row in range(8):
        lines[4 * row + 1 : 4 * row + 3] = 1 - bars[row].float()
    return (
        interpolate(lines[None, None], size=(height, width), mode="nearest")[0]
        .expand(3, height, width)
        .clone()
    )


def _colour(seed: int) -> Tensor:
    return torch.rand(3, 1, 1, generator=generator(seed, "colour"))


DAMAGES: dict[str, Callable[[Tensor, int], Tensor]] = {"blur": blur, "noise": noise}
PROBES: dict[str, Callable[[int, int, int], Tensor]] = {
    "static": _static,
    "flat colour": _flat,
    "mosaic": _mosaic,
    "gradient": _gradient,
    "strokes": _strokes,
}
"""Images [3, H, W] in [0, 1] of (H, W, seed) that show nothing: what a policy drifts to that
fools a reward."""


def strangers(
    prompts: Sequence[str], sizes: Sequence[tuple[int, int]] | None = None
) -> list[int | None]:
    """Find for each prompt one of the half that shares the fewest words with it -> its index, None
    without another.

    They are spread: of that half the one that was taken least. With `sizes`, the other's image
    has the same size.
    """
    words = [set(re.findall(r"\w+", prompt.lower())) for prompt in prompts]
    used = [0] * len(prompts)
    found: list[int | None] = []
    for i, prompt in enumerate(prompts):
        # other prompts, of images of the same size
        others = [j for j in range(len(prompts)) if prompts[j] != prompt]
        others = [j for j in others if sizes is None or sizes[i] == sizes[j]]
        if not others:
            found.append(None)
            continue
        # the half that shares the fewest words, and of that the one taken least
        shared = {j: len(words[i] & words[j]) / max(1, len(words[i] | words[j])) for j in others}
        order = sorted(others, key=lambda j: (shared[j], (j - i) % len(prompts)))
        best = min(order[: -(-len(others) // 2)], key=lambda j: used[j])
        used[best] += 1
        found.append(best)
    return found
