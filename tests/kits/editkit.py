"""A toy whose images start from others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.core.types import Cond, Source
from flowrl.models.toy import LinearFlow


class EditFlow(LinearFlow):
    """The toy, drawn towards the latents of the image that it starts from."""

    most_sources = 1

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Encode prompts as the toy does; "source" [G, C, h, w]."""
        images = torch.stack([image for (image,) in sources])
        return {**self.encode(prompts), "source": self.latents(images)}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the toy's velocity and the way to the source, at sigma 1 all of it."""
        return super().velocity(x, sigma, cond) + x - cond["source"]


def edit_flow() -> EditFlow:
    """Return the editing toy, for configs."""
    return EditFlow()
