"""Save and load the state of a run: safetensors and JSON, whole or not at all, checked when read.

A run keeps them under ``<run>/checkpoints/<iteration>``; each holds ``<name>.safetensors`` files,
``state.json`` and a ``manifest.json`` with the size and SHA-256 of the others, written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.files import replacing
from flowrl.training.optimizer_state import Tensors, plain_json

MANIFEST, STATE, FORMAT = "manifest.json", "state.json", 1


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
        tensors_by_file: file name without ending -> {name: tensor}, of any device.
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
        for name, tensors in tensors_by_file.items():
            save_file(_storable(tensors), draft / f"{name}.safetensors")
        (draft / STATE).write_text(text, encoding="utf-8")
        _seal(draft)


def load(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return (tensors_by_file, state) as given to `save`, on the CPU, after checking every byte.

    Raises CheckpointError that names the file which is missing, torn or altered.
    """
    folder = Path(folder)
    names = verify(folder)
    try:
        tensors = {
            name[: -len(".safetensors")]: load_file(folder / name)
            for name in names
            if name != STATE
        }
        return tensors, json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: cannot be read although its manifest fits: {error}"
        ) from error


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the files of a checkpoint; raise CheckpointError unless all are there and
    unaltered, and of the iteration that the folder is named after."""
    folder = Path(folder)
    files = _manifest(folder)
    for name, entry in files.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(
                    f"{file}: torn or altered: expected {entry['size']} bytes, got {size}"
                )
            if _sha256(file) != entry["sha256"]:
                raise CheckpointError(f"{file}: altered: its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    _check_place(folder, files)
    return list(files)


def _check_place(folder: Path, files: Collection[str]) -> None:
    """Raise CheckpointError if a folder of a run holds the checkpoint of another iteration: it was
    renamed, or swapped with another one."""
    if not folder.name.isdecimal() or STATE not in files:
        return
    try:
        held = json.loads((folder / STATE).read_text(encoding="utf-8")).get("iteration")
    except (OSError, ValueError, AttributeError):
        return  # `load` says what is wrong with it
    if held is not None and held != int(folder.name):
        raise CheckpointError(
            f"{folder}: expected the checkpoint after {int(folder.name)} iterations, got the one "
            f"after {held}: a folder was renamed; give it its name {held:06d} back"
        )


def latest(run: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint of a run, or None; warn about each newer one that is
    torn."""
    for folder in reversed(numbered(Path(run))):
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
    every = numbered(Path(run))
    complete = [folder for folder in every if _complete(folder)]
    doomed = [
        folder
        for folder in every
        if len(complete) >= keep
        and int(folder.name) < int(complete[-keep].name)
        and int(folder.name) not in besides
    ]
    doomed += [
        item
        for item in (Path(run) / "checkpoints").glob("*")
        if re.fullmatch(r"\d+\.(tmp|old)-\d+(-\w+)?", item.name)
    ]
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


def _seal(folder: Path) -> None:
    """Write the manifest: size and SHA-256 of every file."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    manifest = json.dumps({"format": FORMAT, "files": files}, indent=1)
    (folder / MANIFEST).write_text(manifest, encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        files = {
            str(name): {"size": entry["size"], "sha256": entry["sha256"]}
            for name, entry in manifest["files"].items()
        }
        version = manifest["format"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: missing: the checkpoint was never finished, or is none"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: torn or altered: {error}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, got {version!r}; another version of flowrl wrote it"
        )
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


def _complete(folder: Path) -> bool:
    """Say whether all files are there in full length; cheap, because it reads no tensors."""
    try:
        return all(
            (folder / name).stat().st_size == entry["size"]
            for name, entry in _manifest(folder).items()
        )
    except (CheckpointError, OSError):
        return False


def numbered(run: Path) -> list[Path]:
    """Return the checkpoint folders of a run, whole or torn, the oldest first."""
    folders = [
        item
        for item in (run / "checkpoints").glob("*")
        if re.fullmatch(r"[0-9]+", item.name) and item.is_dir()
    ]
    return sorted(folders, key=lambda folder: int(folder.name))
