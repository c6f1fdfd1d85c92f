"""The guidance of the images that are trained on, where it is another than the model's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowrl.config.load import Config
from flowrl.core.abilities import Guides
from flowrl.core.types import FlowModel


def sampling_guidance(config: Config, model: FlowModel) -> AbstractContextManager[None]:
    """Let the model encode and compute with ``train.guidance`` for a while, if that is given."""
    scale = config.train.guidance
    if not scale:
        return nullcontext()
    guides: Guides = model  # type: ignore[assignment]
    return guides.guiding(scale)
