"""Prompt lists that a program handed over as they are: a run keeps them as files in its folder, so
that it can be resumed, judged and exported without the program."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.files import write_text
from flowrl.core.processes import world
from flowrl.core.prompts import GIVEN, load_prompts, prompts_hash
from flowrl.runs.folder import CONFIG

FOLDER = "prompts"
USES = ("train", "test")


def listed_in(config: Config, run: Path) -> Config:
    """Return the config with the files in which a run keeps the lists that a program handed over.

    Raises ConfigError where the run has kept another list.
    """
    files = {}
    for use, file in _given(config, run):
        files[use] = str(file)
        kept = prompts_hash(load_prompts(file)) if file.exists() else None
        if kept not in (None, prompts_hash(load_prompts(getattr(config.prompts, use)))):
            raise ConfigError(
                f"prompts.{use}: {run} was trained with another list ({file}); hand over the same "
                "one, or name another folder"
            )
    return replace(config, prompts=replace(config.prompts, **files)) if files else config


@contextmanager
def lists_kept(config: Config, run: Path, *, resumed: bool) -> Iterator[Config]:
    """Write the lists that a program handed over into the run's folder, and give the config that
    names these files; what fails inside takes them away again.

    A run that is `resumed` has written them already; only the first process writes.
    """
    here, files = world(), [file for _, file in _given(config, run)]
    mine = here.main and not resumed
    here.together(lambda: _write(config, run) if mine else None)
    try:
        yield listed_in(config, run)
    except BaseException:
        if mine and not (run / CONFIG).exists():
            for file in files:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                (run / FOLDER).rmdir()
        raise


def _write(config: Config, run: Path) -> None:
    for use, file in _given(config, run):
        prompts = load_prompts(getattr(config.prompts, use))
        lines = [json.dumps(record, ensure_ascii=False) for record in prompts.records]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(lines) + "\n")


def keep_lists(config: Config, folder: Path) -> Config:
    """Write the lists that a program handed over into a folder of many runs -> the config that
    names these files. Raises ConfigError where the folder has other ones."""
    named = listed_in(config, folder)
    _write(config, folder)
    return named


def moved_along(config: Config, run: Path) -> Config:
    """Return a run's config with its own lists where the folder is now."""
    files = {}
    for use in USES:
        file = run / FOLDER / f"{use}.jsonl"
        named = Path(getattr(config.prompts, use))
        if file.is_file() and named.parts[-2:] == file.parts[-2:]:
            files[use] = str(file)
    return replace(config, prompts=replace(config.prompts, **files)) if files else config


def _given(config: Config, run: Path) -> Iterator[tuple[str, Path]]:
    """Yield each list that a program handed over, and the file of the run that it belongs in."""
    for use in USES:
        if getattr(config.prompts, use).startswith(GIVEN):
            yield use, run / FOLDER / f"{use}.jsonl"
