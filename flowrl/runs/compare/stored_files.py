"""Read the files of a comparison's runs: one that is damaged, or another run's, is one message."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, RunError
from flowrl.runs.compare.file_shapes import mistake, unlike_base
from flowrl.runs.folder import read_object

AGAIN = "delete it, and the same command puts it together again from the run's logs"


def stored(folder: Path, name: str, shape: Mapping[str, Any], mend: str) -> dict[str, Any]:
    """Read an object of a run's folder; {} where there is no such file. Raises RunError that names
    the file and key and says how to mend it."""
    try:
        found = read_object(folder, name)
    except RunError as error:
        raise RunError(f"{error}; {mend}") from error
    if not found and not (folder / name).exists():
        return {}
    wrong = mistake(found, shape)
    if wrong is not None:
        raise RunError(f"{folder / name}: {wrong}; {mend}")
    return found


def check_whose(found: Mapping[str, Any], config: Config, file: Path) -> None:
    """Raise ConfigError if a run's result is that of another config, seed or learning rate."""
    mine = {"name": config.name, "seed": config.seed, "lr": config.lr}
    for key, value in mine.items():
        if found[key] != value:
            raise ConfigError(
                f"{file}: expected the result of {key} {value!r}, got that of {found[key]!r}: the "
                f"file was copied from another run; {AGAIN}"
            )


def check_judged(found: Mapping[str, Any], base: Mapping[str, Any], folder: Path) -> None:
    """Raise RunError if a run was judged on other tasks or prompts than the base model."""
    wrong = unlike_base(found, base)
    if wrong is not None:
        raise RunError(f"{folder / 'result.json'}: {wrong}; {AGAIN}")
