"""The manifest of a checkpoint: which files it has, and whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flowrl.core.errors import CheckpointError
from flowrl.core.files import read_text
from flowrl.core.processes import ALONE, World

MANIFEST, STATE, FORMAT = "manifest.json", "state.json", 1
SHARES = 2  # the format of a checkpoint with shares of tensors
Entries = dict[str, dict[str, Any]]
"""Size and SHA-256 by file."""


def verify(folder: str | os.PathLike[str], world: World = ALONE) -> list[str]:
    """Return the names of the files of a checkpoint; raise CheckpointError unless all are there and
    unaltered, and of the iteration that the folder is named after.

    Of several processes each reads the bytes of its share of the files; one that is missing or has
    another length is found by all.
    """
    folder = Path(folder)
    files = _manifest(folder)
    # hashing takes the time, so the processes share it; sizes are cheap, and all look at them
    mine = [[*files][place] for place in world.share(len(files))]
    for name, entry in files.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(
                    f"{file}: torn or altered: expected {entry['size']} bytes, got {size}"
                )
            if name in mine and _sha256(file) != entry["sha256"]:
                raise CheckpointError(f"{file}: altered: its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    # whole files of a wrong iteration would still make a wrong resume
    _check_place(folder, files)
    return list(files)


def _check_place(folder: Path, files: Collection[str]) -> None:
    """Raise CheckpointError if a folder of a run holds the checkpoint of another iteration: it was
    renamed, or swapped with another one."""
    if not folder.name.isdecimal() or STATE not in files:
        return
    try:
        held = json.loads(read_text(folder / STATE)).get("iteration")
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # `load` says what is wrong with it
    if type(held) is int and held >= 0 and held != int(folder.name):
        raise CheckpointError(
            f"{folder}: expected the checkpoint after {int(folder.name)} iterations, got the one "
            f"after {held}: a folder was renamed; give it its name {held:06d} back"
        )


def entries(files: Sequence[Path]) -> Entries:
    """Return what the manifest says of files: size and SHA-256."""
    return {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in files}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    # read it: one that is missing means an unfinished save, one that cannot be read damage
    try:
        manifest = json.loads(read_text(file))
        files = {
            str(name): {"size": entry["size"], "sha256": entry["sha256"]}
            for name, entry in manifest["files"].items()
        }
        version = manifest["format"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: missing: the checkpoint was never finished, or is none"
        ) from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{file}: torn or altered: {error}") from error
    # a newer format may mean other things by the same names
    if version not in (FORMAT, SHARES):
        raise CheckpointError(
            f"{file}: expected format {FORMAT} or {SHARES}, got {version!r}; another version of "
            "flowrl wrote it"
        )
    # names become paths, so only those that a save can have written are allowed
    strange = [
        name
        for name in files
        if name != STATE and not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name)
    ]
    if strange or STATE not in files:
        raise CheckpointError(
            f"{file}: altered: expected {STATE} and .safetensors files, got {sorted(files)}"
        )
    return files


def complete(folder: Path) -> bool:
    """Say whether all files are there in full length; cheap, because it reads no tensors."""
    try:
        return all(
            (folder / name).stat().st_size == entry["size"]
            for name, entry in _manifest(folder).items()
        )
    except (CheckpointError, OSError):
        return False
