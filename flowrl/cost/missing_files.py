"""Files that a config names and that are not here: what a run downloads, and what has to be made
or put there before it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import find_resource
from flowrl.training.guidance import teachers_of
from flowrl.training.method import COMPANIONS
from flowrl.training.start_weights import check_start, names_of

WRITTEN = ("assets/", "configs/", "data/", "runs/")  # where scripts and runs write: no hub's owners
WEIGHTS = (".bin", ".ckpt", ".json", ".pt", ".pth", ".safetensors")  # no repository ends so
_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")  # owner/name, its file


class Absent(NamedTuple):
    """A file or folder that is not here."""

    part: str  # of the config, as the plan's lines begin
    said: str  # what it is, and what to do
    downloaded: bool = False  # a run fetches it by itself

    @property
    def line(self) -> str:
        """Return it as a line of the plan."""
        return f"{self.part:<11}{self.said}"


def absent_files(config: Config) -> list[Absent]:
    """Return the files of rewards, the teachers and the start weights that are not here.

    Raises ConfigError, as the run would, for start weights that are not here and do not lie where
    scripts and runs write: nothing would bring them.
    """
    return [*_of_rewards(config), *_teachers(config), *_start_weights(config)]


def _of_rewards(config: Config) -> Iterator[Absent]:
    for name, call in config.rewards.items():
        # what a reward reads where its config names nothing
        own = getattr(call.function, "public", {}).get(call.kwargs.get("backend"))
        for path in (call.kwargs.get("path") or own, call.kwargs.get("weights")):
            if not isinstance(path, str) or not path or _is_here(path):
                continue
            if not _named_on_hub(path):
                why = "make it or put it there first"
                yield Absent("rewards", f"{name}: {path} is not here: {why}")
            elif not _in_cache(path):
                why = "the run downloads it from the hub"
                yield Absent("rewards", f"{name}: {path} is not in the cache: {why}", True)


def _teachers(config: Config) -> Iterator[Absent]:
    for run in dict.fromkeys(chain.from_iterable(teachers_of(config).values())):
        if find_resource(run.run) is None:
            yield Absent("teacher", f"{run.run} is not here: train it first")


def _start_weights(config: Config) -> Iterator[Absent]:
    starts: dict[str, str | Sequence[str]] = {"train.start": config.train.start}
    for name in COMPANIONS:
        if getattr(config, name):
            starts[f"{name}.begin"] = getattr(config, name).make().begin
    named = [(key, start) for key, listed in starts.items() for start in names_of(listed)]
    for key, start in named:
        try:
            check_start(start, key)
        except ConfigError:
            if not start.startswith(WRITTEN) or find_resource(start) is not None:
                raise
            what = "train" if start.startswith("runs/") else "make"
            yield Absent("start", f"{key}: {start} is not here: {what} it first")


def _is_here(path: str) -> bool:
    """Say whether a reward finds a path on this machine; `~` is the user's home to it."""
    return find_resource(os.path.expanduser(path)) is not None


def _named_on_hub(path: str) -> bool:
    """Say whether a path that is not here reads as `owner/name` on the hub, or a file of that.
    `weights/dfn5b.bin` does not: it is a file of the user's."""
    first = path.partition("/")[0]
    found = _ON_HUB.fullmatch(path)
    if path.startswith(WRITTEN) or os.path.isdir(first) or found is None:
        return False
    return found[2] is not None or Path(path).suffix.lower() not in WEIGHTS


def _in_cache(path: str) -> bool:
    """Say whether a repository of the hub, or the file of one, was downloaded before."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    found = _ON_HUB.fullmatch(path)
    assert found is not None
    if found[2]:
        return isinstance(try_to_load_from_cache(found[1], found[2]), str)
    folder = repo_folder_name(repo_id=found[1], repo_type="model")
    return (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()
