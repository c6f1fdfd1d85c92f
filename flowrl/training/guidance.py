"""Guidance that is another than the model's own: who has it, and what that costs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flowrl.config.load import Config
from flowrl.core.abilities import Guides
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.teacher_runs import TeacherRun, runs_of
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


def teachers_of(config: Config) -> dict[str, list[TeacherRun]]:
    """Return the teachers of the loss by the value of the records' key; {} if it has none. Raises
    ConfigError."""
    if "teacher" not in needs_of(config.loss.function):
        return {}
    return runs_of(config.loss.kwargs.get("teachers", {}))


def guides_teachers(config: Config) -> float:
    """Return a scale at which a teacher is asked with and without the prompt, where the model has
    but one branch; 0: there is none."""
    if is_guided(config):
        return 0.0
    runs = [one for several in teachers_of(config).values() for one in several]
    return next((one.guidance or 0.0 for one in runs if _is_guided_at(config, one)), 0.0)


def teacher_calls(config: Config) -> int:
    """Return the network calls that a row's teachers take: of the domain that has most, two for a
    teacher that is guided where the model is not."""
    most = 0
    for runs in teachers_of(config).values():
        most = max(most, sum(calls_of_teacher(config, one) for one in runs))
    return most


def calls_of_teacher(config: Config, teacher: TeacherRun) -> int:
    """Return the network calls that a row takes under a teacher, each of its own guidance."""
    return 2 if not is_guided(config) and _is_guided_at(config, teacher) else 1


def _is_guided_at(config: Config, teacher: TeacherRun) -> bool:
    """Say whether the model evaluates the network twice under a teacher. Raises ConfigError for a
    model that has no guidance but its own."""
    scale, options = teacher.guidance, getattr(config.model.function, "options", None)
    if scale is None:
        return is_guided(config)
    if options is None:
        return scale > 1
    try:
        return bool(options(**config.model.kwargs).guided_by(scale, off=True).guided)
    except ConfigError as error:
        raise ConfigError(f"loss.teachers, {teacher.run}: {error}") from error


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
