"""What a config's rewards and prompts need that is not on this machine, and the commands that get
it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.abilities import asks_people
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import find_resource

WRITTEN = ("assets/", "configs/", "data/", "runs/")  # where scripts and runs write: no hub's owners
WEIGHTS = (".bin", ".ckpt", ".json", ".pt", ".pth", ".safetensors")  # no repository ends so
_ON_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")  # owner/name, its file
NAMES = ("path", "weights", "processor", "tokenizer", "clip", "vqa")
"""Arguments of rewards that name files to be read, where a reward has no `reads` of its own."""


class Unmet(NamedTuple):
    """A file or repository that a reward reads and that is not here."""

    reward: str
    argument: str  # of the reward, which names it
    path: str
    on_hub: bool  # it reads as a repository of the hub, or a file of one

    @property
    def line(self) -> str:
        """Say which it is, and how to get it."""
        where = f"rewards.{self.reward}.{self.argument}"
        if not self.on_hub:
            return f"{where}: {self.path} is not here: make it or put it there first"
        repository = _ON_HUB.fullmatch(self.path)
        assert repository is not None
        file = f" {repository[2]}" if repository[2] else ""
        return f"{where}: hf download {repository[1]}{file}, or --set {where}=PATH"


def reads(call: Call) -> dict[str, str]:
    """Return the files and repositories that a reward reads, by the argument that names them; its
    own ``reads(arguments)`` says it where it has one."""
    own = getattr(call.function, "reads", None)
    named = own(call.kwargs) if own else {name: call.kwargs.get(name) for name in NAMES}
    return {name: path for name, path in named.items() if isinstance(path, str) and path}


def unmet(call: Call, name: str) -> Iterator[Unmet]:
    """Yield what a reward of this name reads and what is neither here nor in the cache."""
    for argument, path in reads(call).items():
        on_hub = named_on_hub(path)
        if not is_here(path) and not (on_hub and in_cache(path)):
            yield Unmet(name, argument, path, on_hub)


def is_here(path: str) -> bool:
    """Say whether a reward finds a path on this machine; `~` is the user's home to it."""
    return find_resource(os.path.expanduser(path)) is not None


def named_on_hub(path: str) -> bool:
    """Say whether a path that is not here reads as `owner/name` on the hub, or a file of that.
    `weights/dfn5b.bin` does not: it is a file of the user's."""
    first = path.partition("/")[0]
    found = _ON_HUB.fullmatch(path)
    if path.startswith(WRITTEN) or os.path.isdir(first) or found is None:
        return False
    return found[2] is not None or Path(path).suffix.lower() not in WEIGHTS


def in_cache(path: str) -> bool:
    """Say whether a repository of the hub, or the file of one, was downloaded before."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name

    found = _ON_HUB.fullmatch(path)
    assert found is not None
    if found[2]:
        return isinstance(try_to_load_from_cache(found[1], found[2]), str)
    folder = repo_folder_name(repo_id=found[1], repo_type="model")
    return (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()


def weights_needed(config: Config) -> list[str]:
    """Return a line for all weights of a config's rewards that are not here, with the command that
    gets them."""
    lines = []
    for name, call in config.rewards.items():
        lines += [need.line for need in unmet(call, name)]
    return lines


def check_needs(config: Config) -> None:
    """Raise ConfigError that names everything at once that judging by a config needs and that is
    not here: prompts, weights, packages, servers. Weights of the hub count where nothing can be
    downloaded; a reward that reads none is made and asked whether it is ready."""
    from huggingface_hub import constants

    lines = []
    try:
        load_prompts(config.prompts.test)
    except FlowRLError as error:
        lines.append(f"prompts: {error}")
    for name, call in config.rewards.items():
        missing = [*unmet(call, name)]
        lines += [each.line for each in missing if constants.HF_HUB_OFFLINE or not each.on_hub]
        if not reads(call) and hasattr(call.function, "probe") and not asks_people(call.function):
            try:
                call.make().probe()
            except FlowRLError as error:
                lines.append(f"{error}")
    if lines:
        raise ConfigError("\n  ".join(["what is needed here is missing:", *lines]))
