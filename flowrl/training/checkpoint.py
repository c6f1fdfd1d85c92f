"""Save and load the state of a run: safetensors and JSON, whole or not at all, checked when read.

A run keeps them under ``<run>/checkpoints/<iteration>``; each holds ``<name>.safetensors`` files,
or of a run under FSDP ``<name>-00001-of-00008.safetensors`` with shares of tensors, ``state.json``
and a ``manifest.json`` with the size and SHA-256 of the others, written last.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.files import replacing
from flowrl.core.processes import ALONE, World
from flowrl.core.shards import write_shares
from flowrl.training.checkpoint_files import CheckpointTensors, Like
from flowrl.training.checkpoint_manifest import (
    FORMAT,
    MANIFEST,
    SHARES,
    STATE,
    Entries,
    complete,
    entries,
    verify,
)
from flowrl.training.optimizer_state import Tensors, plain_json

__all__ = [
    "MANIFEST",
    "STATE",
    "CheckpointTensors",
    "verify",
]  # of other files, beside what is here


def checkpoint_folder(run: str | os.PathLike[str], iteration: int) -> Path:
    """Return where the checkpoint after `iteration` finished iterations belongs:
    ``<run>/checkpoints/000020``."""
    return Path(run) / "checkpoints" / f"{iteration:06d}"


def save(
    folder: str | os.PathLike[str],
    tensors_by_file: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint so that `folder` is either complete or absent, also after a power cut.

    Args:
        folder: the final folder; one that is there already is replaced.
        tensors_by_file: file name without ending -> {name: tensor}, of any shape, dtype and device.
        state: plain JSON values with text keys; tuples come back as lists.
    Raises CheckpointError if something cannot be stored without loss, RunError (with the system's
    reason) if the disk is full or the folder not writable; nothing half-written stays behind.
    """
    folder = Path(folder)
    _check_names(tensors_by_file)
    text = plain_json(state)
    what = f"the checkpoint {folder}"
    with replacing(folder, what=what, durable=True, overwrite_folder=True) as draft:
        draft.mkdir(parents=True)
        _write(draft, tensors_by_file, text)
        _seal(draft)


def save_shares(
    folder: str | os.PathLike[str],
    world: World,
    shares: Mapping[str, Mapping[str, Tensor]],
    tensors_by_file: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint as `save` does, in which every process writes what it holds of `shares`,
    {file: {name: tensor of any shape}}; the rest is written by the first one. All processes call
    it, and must see the folder.

    Raises in each process what `save` raises, if one of them cannot write.
    """
    folder = Path(folder)
    _check_names({**shares, **tensors_by_file})
    text, what = plain_json(state), f"the checkpoint {folder}"
    with ExitStack() as stack:

        def begin() -> Path | None:
            if not world.main:
                return None
            exchange = replacing(folder, what=what, durable=True, overwrite_folder=True)
            draft = stack.enter_context(exchange)
            draft.mkdir(parents=True)
            return draft

        draft = world.gather(world.together(begin))[0]
        assert draft is not None
        # each process its files, and what they are
        mine: list[Path] = []
        for name, tensors in shares.items():
            mine += write_shares(draft, name, tensors, world.rank, world.size)
        sealed = world.gather(world.together(lambda: entries(mine)))

        def finish() -> None:
            """Seal the draft, and give it its name."""
            for name in shares:
                shutil.rmtree(draft / f"{name}.parts", ignore_errors=True)
            files: Entries = {}
            for rank, written in enumerate(sealed):
                _check_seen(draft, written, rank)
                files |= written
            _write(draft, tensors_by_file, text)
            _seal(draft, files, SHARES)
            stack.close()

        world.together(lambda: finish() if world.main else None)


def _write(draft: Path, tensors_by_file: Mapping[str, Mapping[str, Tensor]], text: str) -> None:
    for name, tensors in tensors_by_file.items():
        save_file(_storable(tensors), draft / f"{name}.safetensors")
    (draft / STATE).write_text(text, encoding="utf-8")


def _check_seen(draft: Path, written: Entries, rank: int) -> None:
    """Raise OSError for a file that another process has written elsewhere."""
    for name in written:
        if not (draft / name).is_file():
            raise FileNotFoundError(
                f"process {rank} wrote {name} to a folder that process 0 does not see; under FSDP "
                "all machines must share the run's folder"
            )


def load(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return (tensors_by_file, state) as given to `save`, on the CPU, after checking every byte.

    Raises CheckpointError that names the file which is missing, torn or altered.
    """
    files, state = open_checkpoint(folder)
    return dict(files), state


def open_checkpoint(
    folder: str | os.PathLike[str], *, like: Like | None = None, world: World = ALONE
) -> tuple[CheckpointTensors, dict[str, Any]]:
    """Return what `load` does, but tensors are read when they are asked for, one file at a time.

    Where `like` names a parameter that is shared out, only this process' share is read, to the
    parameter's device. Of several processes each checks the bytes of its share of the files. Raises
    CheckpointError as `load` does.
    """
    folder = Path(folder)
    names = verify(folder, world)
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / STATE}: cannot be read although its manifest fits: {error}"
        ) from error
    return CheckpointTensors(folder, [name for name in names if name != STATE], like), state


def latest(run: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint of a run, or None; warn about each newer one that is
    torn."""
    for folder in reversed(checkpoint_folders(Path(run))):
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=2)
    return None


def prune(run: str | os.PathLike[str], keep: int, *, besides: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` complete checkpoints of a run and those of the
    iterations `besides`, and what interrupted saves left behind.

    Torn checkpoints do not count as kept, so the last good one is never lost. A folder that cannot
    be deleted is a warning. Raises CheckpointError if keep < 1.
    """
    if keep < 1:
        raise CheckpointError(f"expected to keep at least 1 checkpoint, got {keep}")
    # complete checkpoints that are older than the newest `keep`, and wanted by nobody
    every = checkpoint_folders(Path(run))
    good = [folder for folder in every if complete(folder)]
    doomed = [
        folder
        for folder in every
        if len(good) >= keep
        and int(folder.name) < int(good[-keep].name)
        and int(folder.name) not in besides
    ]
    # drafts (.tmp-) and replaced folders (.old-) that a killed process could not clean up
    doomed += [
        item
        for item in (Path(run) / "checkpoints").glob("*")
        if re.fullmatch(r"\d+\.(tmp|old)-\d+(-\w+)?", item.name)
    ]
    # go on after a folder that stays: the run matters more than its disk
    for folder in doomed:
        try:
            discard(folder)
        except OSError as error:
            warnings.warn(
                f"cannot delete the old checkpoint {folder}: {error.strerror or error}",
                stacklevel=2,
            )


def discard(folder: Path) -> None:
    """Delete a checkpoint so that it is whole or gone, also if the process is killed meanwhile: it
    gives up its name first. Raises OSError."""
    old = folder
    if re.fullmatch(r"[0-9]+", folder.name):
        old = folder.with_name(f"{folder.name}.old-{os.getpid()}-{secrets.token_hex(4)}")
        os.replace(folder, old)
    shutil.rmtree(old)


def _check_names(tensors_by_file: Mapping[str, Any]) -> None:
    for name in tensors_by_file:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise CheckpointError(
                f"expected a file name of letters, digits, _ and - without an ending, got {name!r}"
            )


def _storable(tensors: Mapping[str, Tensor]) -> Tensors:
    out: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if (
            storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        ):  # safetensors refuses shared memory
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor
    return out


def _seal(folder: Path, known: Entries | None = None, version: int = FORMAT) -> None:
    """Write the manifest: size and SHA-256 of every file, of which some may be known."""
    known = known or {}
    others = [file for file in sorted(folder.iterdir()) if file.name not in known]
    files = dict(sorted({**known, **entries(others)}.items()))
    manifest = json.dumps({"format": version, "files": files}, indent=1)
    (folder / MANIFEST).write_text(manifest, encoding="utf-8")


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, whole or torn, the oldest first."""
    folders = [
        item
        for item in (run / "checkpoints").glob("*")
        if re.fullmatch(r"[0-9]+", item.name) and item.is_dir()
    ]
    return sorted(folders, key=lambda folder: int(folder.name))
