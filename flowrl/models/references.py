"""The images that a model's prompts start from, as its conditioning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from flowrl.core.errors import DataError
from flowrl.core.pixels import to_bytes
from flowrl.core.types import Source

SOURCE = "source"  # the name of their latents among a model's conditioning


def stacked(prompts: Sequence[str], sources: Sequence[Source], most: int) -> Tensor:
    """Return the sources of prompts [G] as images [G,n,3,H,W], n each. Raise DataError for another
    number of them than 1 to ``most``, for prompts with more than others, or for images of two
    sizes."""
    counts = {len(source) for source in sources}
    if len(sources) != len(prompts) or not counts <= {*range(1, most + 1)}:
        wanted = "one source" if most == 1 else f"1 to {most} sources"
        raise DataError(
            f"encode: expected {wanted} for each of {len(prompts)} prompts, got "
            f"{[len(source) for source in sources]}"
        )
    sizes = {tuple(image.shape[-2:]) for source in sources for image in source}
    if len(counts) > 1 or len(sizes) > 1:
        raise DataError(
            "encode: prompts of one call must have as many sources as each other, all of one size; "
            f"got {sorted(counts)} sources of the sizes {sorted(sizes)}. Take a list for each"
        )
    return torch.stack([torch.stack(source) for source in sources])


def to_pil(source: Source) -> list[Image]:
    """Return images [3,H,W] in [0,1] as a pipeline takes them, of 8 bits."""
    return [to_pil_image(to_bytes(image.cpu())) for image in source]
