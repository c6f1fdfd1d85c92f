"""Save and load the state of a run: safetensors and JSON, whole or not at all, checked when read.

A run keeps them under ``<run>/checkpoints/<iteration>``; each holds ``<name>.safetensors`` files, ``state.json`` and a
``manifest.json`` with the size and SHA-256 of the others, written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.dist import shared_as
from flowrl.errors import CheckpointError, RunError

MANIFEST, STATE, FORMAT = "manifest.json", "state.json", 1
Tensors = dict[str, Tensor]


def checkpoint_folder(run: str | os.PathLike[str], iteration: int) -> Path:
    """Return where the checkpoint after `iteration` finished iterations belongs: ``<run>/checkpoints/000020``."""
    return Path(run) / "checkpoints" / f"{iteration:06d}"


def save(
    folder: str | os.PathLike[str], tensors_by_file: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]
) -> None:
    """Write a checkpoint so that `folder` is either complete or absent, also after a power cut.

    Args:
        folder: the final folder; one that is there already is replaced.
        tensors_by_file: file name without ending -> {name: tensor}, of any device.
        state: plain JSON values with text keys; tuples come back as lists.
    Raises CheckpointError if something cannot be stored without loss, RunError (with the system's reason) if the disk
    is full or the folder not writable; nothing half-written stays behind.
    """
    folder = Path(folder)
    _check_names(tensors_by_file)
    text = _to_json(state)
    partial = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, tensors in tensors_by_file.items():
            save_file(_storable(tensors), partial / f"{name}.safetensors")
        (partial / STATE).write_text(text, encoding="utf-8")
        _seal(partial)
        _swap(partial, folder)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RunError(f"cannot write the checkpoint {folder}: {reason}; nothing half-written was kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(folder: str | os.PathLike[str]) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return (tensors_by_file, state) as given to `save`, on the CPU, after checking every byte.

    Raises CheckpointError that names the file which is missing, torn or altered.
    """
    folder = Path(folder)
    names = verify(folder)
    try:
        tensors = {name[: -len(".safetensors")]: load_file(folder / name) for name in names if name != STATE}
        return tensors, json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder}: cannot be read although its manifest fits: {error}") from error


def verify(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the files of a checkpoint; raise CheckpointError unless all are there and unaltered."""
    folder = Path(folder)
    files = _manifest(folder)
    for name, entry in files.items():
        file = folder / name
        try:
            size = file.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(f"{file}: torn or altered: expected {entry['size']} bytes, got {size}")
            if _sha256(file) != entry["sha256"]:
                raise CheckpointError(f"{file}: altered: its SHA-256 is not the one in {MANIFEST}")
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    return list(files)


def latest(run: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint of a run, or None; warn about each newer one that is torn."""
    for folder in reversed(_numbered(Path(run))):
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            warnings.warn(f"skipping a checkpoint: {error}", stacklevel=2)
    return None


def prune(run: str | os.PathLike[str], keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints of a run, and what interrupted saves left behind.

    Torn checkpoints do not count as kept, so the last good one is never lost. A folder that cannot be deleted is a
    warning. Raises CheckpointError if keep < 1.
    """
    if keep < 1:
        raise CheckpointError(f"expected to keep at least 1 checkpoint, got {keep}")
    every = _numbered(Path(run))
    complete = [folder for folder in every if _complete(folder)]
    doomed = [folder for folder in every if len(complete) >= keep and int(folder.name) < int(complete[-keep].name)]
    doomed += [item for item in (Path(run) / "checkpoints").glob("*") if re.fullmatch(r"\d+\.(tmp|old)-\d+", item.name)]
    for folder in doomed:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            warnings.warn(f"cannot delete the old checkpoint {folder}: {error.strerror or error}", stacklevel=2)


def optimizer_to_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Split the state of an AdamW-like optimizer into ({"<index>.<key>": tensor}, JSON state), without pickle.

    Parameters are numbered in the order of the optimizer's groups.
    """
    tensors: Tensors = {}
    scalars: dict[str, Any] = {}
    for index, parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach()
            else:
                scalars[f"{index}.{key}"] = value
    groups = [
        {key: len(value) if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    state = {"scalars": scalars, "groups": groups}
    _to_json(state)
    return tensors, state


def optimizer_from_tensors(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], json_state: dict[str, Any]
) -> None:
    """Put back what `optimizer_to_tensors` took, bit for bit, hyper-parameters included.

    The state is set directly: `Optimizer.load_state_dict` would cast float32 moments of bfloat16 weights.
    Raises CheckpointError if groups, numbers of parameters or shapes differ; the optimizer is then unchanged.
    """
    saved = json_state["groups"]
    have = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    if [(sorted(group), group["params"]) for group in saved] != [(sorted(group), group["params"]) for group in have]:
        raise CheckpointError(
            f"the optimizer does not fit: expected groups of {[group['params'] for group in saved]} parameters "
            f"with the saved settings, got {[group['params'] for group in have]}"
        )
    state: dict[int, dict[str, Any]] = {index: {} for index, _ in _parameters(optimizer)}
    for name, value in {**json_state["scalars"], **tensors}.items():
        index, _, key = name.partition(".")
        if not index.isdigit() or int(index) not in state:
            raise CheckpointError(f"the optimizer does not fit: it has no parameter for the saved state {name!r}")
        state[int(index)][key] = value
    placed = [
        (parameter, _placed(index, parameter, state[index], optimizer)) for index, parameter in _parameters(optimizer)
    ]
    for group, old in zip(optimizer.param_groups, saved, strict=True):
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in old.items() if k != "params"})
    for parameter, values in placed:
        optimizer.state.pop(parameter, None)
        if values:
            optimizer.state[parameter] = values


SCALES = ("qmap", "absmax")  # of moments of 8 bits: they have shapes of their own


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Tensor]]:
    yield from enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _placed(index: int, parameter: Tensor, values: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    on_device = bool(group.get("fused") or group.get("capturable"))  # otherwise torch keeps `step` on the CPU
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            if value.dim() and value.shape != parameter.shape and not key.startswith(SCALES):
                raise CheckpointError(
                    f"the optimizer does not fit: {key} of parameter {index} has shape {list(value.shape)}, "
                    f"expected {list(parameter.shape)}"
                )
            value = shared_as(value, parameter)
            value = value.to("cpu" if key == "step" and not on_device else parameter.device, copy=True)
        out[key] = value
    return out


def _check_names(tensors_by_file: Mapping[str, Any]) -> None:
    for name in tensors_by_file:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise CheckpointError(f"expected a file name of letters, digits, _ and - without an ending, got {name!r}")


def _to_json(state: dict[str, Any]) -> str:
    def check(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                if not isinstance(key, str):
                    raise CheckpointError(f"{where}: expected text keys, got {key!r}, which JSON would turn into text")
                check(child, f"{where}.{key}")
        elif isinstance(value, list | tuple):
            for number, child in enumerate(value):
                check(child, f"{where}[{number}]")
        elif type(value) not in (str, int, float, bool, type(None)):
            raise CheckpointError(
                f"{where}: expected a plain JSON value (tensors have their own files), got {type(value)}"
            )

    check(state, "state")
    return json.dumps(state, indent=1)


def _storable(tensors: Mapping[str, Tensor]) -> Tensors:
    out: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:  # safetensors refuses shared memory
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor
    return out


def _seal(folder: Path) -> None:
    files = {}
    for file in sorted(folder.iterdir()):
        _sync(file)
        files[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def _swap(partial: Path, folder: Path) -> None:
    old = folder.with_name(f"{folder.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    there = folder.exists()
    if there:
        os.replace(folder, old)
    try:
        os.replace(partial, folder)
    except OSError:
        if there:
            os.rename(old, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
            str(name): {"size": entry["size"], "sha256": entry["sha256"]} for name, entry in manifest["files"].items()
        }
        version = manifest["format"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: missing: the checkpoint was never finished, or is none") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: torn or altered: {error}") from error
    if version != FORMAT:
        raise CheckpointError(f"{file}: expected format {FORMAT}, got {version!r}; another version of flowrl wrote it")
    strange = [name for name in files if name != STATE and not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name)]
    if strange or STATE not in files:
        raise CheckpointError(f"{file}: altered: expected {STATE} and .safetensors files, got {sorted(files)}")
    return files


def _complete(folder: Path) -> bool:
    """Say whether all files are there in full length; cheap, because it reads no tensors."""
    try:
        return all((folder / name).stat().st_size == entry["size"] for name, entry in _manifest(folder).items())
    except (CheckpointError, OSError):
        return False


def _numbered(run: Path) -> list[Path]:
    folders = [item for item in (run / "checkpoints").glob("*") if re.fullmatch(r"[0-9]+", item.name) and item.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name))
