"""Guidance: whether a model has it, and how it has another for a while."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowrl.config.load import Config
from flowrl.core.abilities import Guides
from flowrl.core.errors import ConfigError
from flowrl.core.types import FlowModel

KEYS = ("guidance", "reference_guidance")  # of the section train


def is_guided(config: Config) -> bool:
    """Say whether each velocity evaluates the network with and without the prompt."""
    options = getattr(config.model.function, "options", None)
    if options is not None:  # of a pipeline of diffusers
        return bool(options(**config.model.kwargs).guided)
    scale = config.model.kwargs.get("guidance")
    return isinstance(scale, int | float) and scale > 1


def guides_reference(config: Config) -> bool:
    """Say whether the base weights are asked with and without the prompt, and the trained ones
    only with it."""
    return bool(config.train.reference_guidance) and not is_guided(config)


def no_prompt(model: FlowModel) -> str:
    """Return the text that stands for no prompt: the model's negative prompt, or an empty text."""
    return getattr(model, "negative_prompt", None) or ""


def guiding(model: FlowModel, scale: float) -> AbstractContextManager[None]:
    """Let the model compute with a guidance for a while; 0: its own."""
    return _guides(model).guiding(scale) if scale else nullcontext()


def teacher_guidance(model: FlowModel, scale: float | None) -> AbstractContextManager[None]:
    """Let the model compute with a guidance for a while, which may be none at all; None: its
    own."""
    return nullcontext() if scale is None else _guides(model).guiding(scale, off=True)


def check_guides(
    config: Config, model: FlowModel, where: str, scale: float, *, off: bool = False
) -> None:
    """Raise ConfigError unless a model can have a guidance; off: also none at all."""
    if not isinstance(model, Guides):
        raise ConfigError(
            f"{where}={scale:g}: model {config.model.fn} has no `guiding`, so it has one guidance "
            "throughout; leave it out"
        )
    with model.guiding(scale, off=off):  # or says why it cannot
        pass


def _guides(model: FlowModel) -> Guides:
    guides: Guides = model  # type: ignore[assignment]
    return guides
