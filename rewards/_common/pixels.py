"""The public preprocessings of CLIP-family scorers: an RGB image becomes a square of pixels in
[0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from .scorer import OPENAI_MEAN, OPENAI_STD

_BICUBIC = Image.Resampling.BICUBIC


def shortest(image: Image.Image, size: int) -> Tensor:
    """Bring the short side to `size` by PIL's bicubic filter, crop the centre -> [3, size, size] in
    [0, 1].

    Size and corner are rounded as torchvision (OpenAI's CLIP, open_clip) rounds them: an odd margin
    of 3 is cut at 2.
    """
    short, long = sorted(image.size)
    wide = [size if side == short else int(size * long / short) for side in image.size]
    left, top = (round((side - size) / 2) for side in wide)
    resized = image.resize((wide[0], wide[1]), _BICUBIC)
    return _levels(resized.crop((left, top, left + size, top + size)))


def shortest_tensors(images: Tensor, size: int) -> Tensor:
    """Do what `shortest` does to images [N, 3, H, W] in [0, 1], as tensors, so that a gradient
    passes -> [N, 3, size, size], about [0, 1].

    THUDM/ImageReward at c1392c6 (ReFL.py): torch's bicubic filter, with antialiasing as PIL's has.
    **Differs** from `shortest`: nothing is rounded to 8 bits, and bicubic overshoot stays.
    """
    height, width = images.shape[-2:]
    short, long = sorted((height, width))
    high, wide = (size if side == short else int(size * long / short) for side in (height, width))
    if (high, wide) != (height, width):
        images = functional.interpolate(images, (high, wide), mode="bicubic", antialias=True)
    top, left = round((high - size) / 2), round((wide - size) / 2)
    return images[..., top : top + size, left : left + size]


def squash(image: Image.Image, size: int) -> Tensor:
    """Bring both sides to `size` by PIL's bicubic filter, whatever the aspect -> [3, size, size] in
    [0, 1]."""
    return _levels(image.resize((size, size), _BICUBIC))


def letterbox(image: Image.Image, size: int, *, antialias: bool = True) -> Tensor:
    """Bring the long side to `size`, fill up with black around the centre -> [3, size, size], about
    [0, 1].

    As in tgxs002/HPSv2 (ResizeMaxSize after ToTensor) the *tensor* is resized: no rounding to 8
    bits, and bicubic overshoot stays. **Differs:** HPSv2 leaves an image unpadded whose long side
    already is `size`; here it is padded.
    """
    return letterbox_tensors(_levels(image)[None], size, antialias=antialias)[0]


def letterbox_tensors(images: Tensor, size: int, *, antialias: bool = True) -> Tensor:
    """Do what `letterbox` does to images [N, 3, H, W] in [0, 1], without rounding, so that a
    gradient passes -> [N, 3, size, size]."""
    scale = size / max(images.shape[-2:])
    height, width = (max(1, round(side * scale)) for side in images.shape[-2:])
    if (height, width) != images.shape[-2:]:
        images = functional.interpolate(
            images, (height, width), mode="bicubic", antialias=antialias
        )
    left, top = (size - width) // 2, (size - height) // 2
    return functional.pad(images, (left, size - width - left, top, size - height - top))


def _levels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1).contiguous() / 255


def normalise(
    pixels: Tensor,
    mean: Sequence[float] | Tensor = OPENAI_MEAN,
    std: Sequence[float] | Tensor = OPENAI_STD,
) -> Tensor:
    """Subtract a mean and divide by a std, OpenAI's unless others are given, per channel [..., 3,
    H, W]. Tensors [3] that are on the device of the pixels are not copied."""
    middle = torch.as_tensor(mean, device=pixels.device)
    spread = torch.as_tensor(std, device=pixels.device)
    return (pixels - middle[:, None, None]) / spread[:, None, None]
