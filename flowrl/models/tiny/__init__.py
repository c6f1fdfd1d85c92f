"""Tiny pipelines of the real diffusers classes with random weights, to rehearse with on a CPU and
without a network: the same bytes for the same seed, with tokenizers of single letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import replacing
from flowrl.models.facts import Made, adapters, function_at


def tinies() -> dict[str, Made]:
    """Return what makes each tiny pipeline, by its name: that of the adapter, or of a variant."""
    found: dict[str, Made] = {}
    for make in adapters().values():
        found |= make.facts.tiny  # type: ignore[attr-defined]
    return found


def save_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save the tiny pipeline of this name, one of `tinies` or of a class of diffusers, in a new or
    empty folder, as diffusers writes it -> the folder. Raises ConfigError for an unknown name and a
    folder that holds something."""
    known = tinies()
    if name not in known and name not in _classes():
        names = [*known, *_classes()]
        raise ConfigError(f"tiny: flowrl {unknown(name, names, 'tiny pipeline')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"tiny: expected a new or empty folder, got {folder}")
    with replacing(folder) as draft:
        if name in known:
            place, options = known[name]
            function_at(place)(draft, seed=seed, **options)
        else:
            from flowrl.models.tiny.classes import save

            save(name, draft, seed=seed)
    return folder


def _classes() -> dict[str, Any]:
    """Return the classes of diffusers with a tiny pipeline; all of its modules are read."""
    from flowrl.models.tiny.classes import CLASSES

    return CLASSES
