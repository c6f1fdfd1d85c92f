"""Where guidance is another than the model's own: in sampling, and for the base model that the
policy is measured against."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowrl.config.load import Config
from flowrl.core.abilities import Guides
from flowrl.core.types import FlowModel

KEYS = ("guidance", "reference_guidance")  # of the section train


def is_guided(config: Config) -> bool:
    """Say whether each velocity evaluates the network with and without the prompt."""
    options = getattr(config.model.function, "options", None)
    if options is not None:  # of a pipeline of diffusers
        return bool(options(**config.model.kwargs).guided)
    scale = config.model.kwargs.get("guidance")
    return isinstance(scale, int | float) and scale > 1


def samples_guided(config: Config) -> bool:
    """Say whether the images that are trained on are sampled with and without the prompt, by a
    model that is trained without guidance."""
    return bool(config.train.guidance) and not is_guided(config)


def guides_reference(config: Config) -> bool:
    """Say whether the base weights are asked with and without the prompt, and the trained ones
    only with it."""
    return bool(config.train.reference_guidance) and not is_guided(config)


def sampling_guidance(config: Config, model: FlowModel) -> AbstractContextManager[None]:
    """Let the model compute with ``train.guidance`` for a while, if that is given."""
    return _guiding(model, config.train.guidance)


def reference_guidance(config: Config, model: FlowModel) -> AbstractContextManager[None]:
    """Let the model compute with ``train.reference_guidance`` for a while, if that is given."""
    return _guiding(model, config.train.reference_guidance)


def encoding_guidance(config: Config, model: FlowModel) -> AbstractContextManager[None]:
    """Let the model encode what sampling or training computes with: the negative prompt, too, if
    either is guided."""
    return _guiding(model, config.train.guidance or config.train.reference_guidance)


def _guiding(model: FlowModel, scale: float) -> AbstractContextManager[None]:
    if not scale:
        return nullcontext()
    guides: Guides = model  # type: ignore[assignment]
    return guides.guiding(scale)
