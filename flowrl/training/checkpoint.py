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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.files import read_text, replacing, sha256_of
from flowrl.core.processes import ALONE, World
from flowrl.core.shards import is_share, kinds, read_into, room_for, write_shares
from flowrl.training.optimizer_state import Tensors, plain_json

MANIFEST, STATE, FORMAT = "manifest.json", "state.json", 3
SHARES = 4  # the format of a checkpoint with shares of tensors
Entries = dict[str, dict[str, Any]]
"""Size and SHA-256 by file."""
ENDING = ".safetensors"
Like = Callable[[str, str], Tensor | None]
"""``like(file, name)``: the parameter that a tensor is shared out as, or None."""
Found = TypeVar("Found")
_SHARES = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")


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

        def begin() -> Path:
            exchange = replacing(folder, what=what, durable=True, overwrite_folder=True)
            draft = stack.enter_context(exchange)
            draft.mkdir(parents=True)
            return draft

        draft = world.by_main(begin)
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

        world.by_main(finish)


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
    good, doomed = list(filter(complete, every)), []
    for folder in every:
        older = len(good) >= keep and int(folder.name) < int(good[-keep].name)
        if older and int(folder.name) not in besides:
            doomed.append(folder)
    # drafts (.tmp-) and replaced folders (.old-) that a killed process could not clean up
    for item in (Path(run) / "checkpoints").glob("*"):
        if re.fullmatch(r"\d+\.(tmp|old)-\d+(-\w+)?", item.name):
            doomed.append(item)
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
            if name in mine and sha256_of(file) != entry["sha256"]:
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
    return {file.name: {"size": file.stat().st_size, "sha256": sha256_of(file)} for file in files}


def sealed(folder: Path, name: str) -> dict[str, str]:
    """Return the SHA-256 of a checkpoint's files of one name, ``current``, as its manifest has
    them. Raises CheckpointError."""
    found = {}
    for file, entry in _manifest(folder).items():
        if _name_of(file) == name:
            found[file] = str(entry["sha256"])
    return found


def _name_of(file: str) -> str:
    """Return the name of what a file holds: that of all files with shares of it."""
    shares = _SHARES.fullmatch(file)
    if shares:
        return shares[1]
    return file.removesuffix(ENDING)


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


class _Some(Mapping[str, Tensors]):
    """Some files of a checkpoint."""

    def __init__(self, files: Mapping[str, Tensors], names: Sequence[str]) -> None:
        self._files, self._names = files, names

    def __getitem__(self, name: str) -> Tensors:
        if name not in self._names:
            raise KeyError(name)
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class CheckpointTensors(Mapping[str, Tensors]):
    """Tensors by file, {"current": {name: tensor}, ...}; what one holds is read anew each time."""

    def __init__(self, folder: Path, names: Sequence[str], like: Like | None = None) -> None:
        self.folder, self._like = folder, like
        self._files: dict[str, list[Path]] = {}
        for name in names:
            self._files.setdefault(_name_of(name), []).append(folder / name)

    def __getitem__(self, name: str) -> Tensors:
        """Read a file, or all of several files with shares. Raises CheckpointError."""
        files = self._files[name]
        if not self._in_shares(name) and self._like is None:
            return self._read(lambda: load_file(files[0]))
        targets = {}
        for key, kind in self._read(lambda: kinds(files)).items():
            targets[key] = room_for(kind, self._like(name, key) if self._like else None)
        self._read(lambda: read_into(targets, files))
        return targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    @property
    def averaged(self) -> str:
        """Return the name of the averaged weights, or of the current ones where there are none."""
        return "ema" if "ema" in self else "current"

    def only(self, names: Iterable[str]) -> Mapping[str, Tensors]:
        """Return some of the files, each read when it is asked for."""
        return _Some(self, [*names])

    def pop(self, name: str) -> Tensors:
        """Read a file and forget it. Raises CheckpointError, and KeyError where there is none."""
        found = self[name]
        self.drop(name)
        return found

    def drop(self, name: str) -> None:
        """Forget a file unread."""
        del self._files[name]

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a file's tensors; only headers are read. Raises CheckpointError."""
        files = self._files[name]
        if self._in_shares(name):
            return {key: kind.shape for key, kind in self._read(lambda: kinds(files)).items()}
        return self._read(lambda: _shapes(files[0]))

    def read_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors, or this process' shares of them, from a file of this name, one after the
        other. Raises CheckpointError."""
        files = self._files[name]
        shared = self._in_shares(name) or any(map(is_share, targets.values()))
        work = read_into if shared else _copy_into
        self._read(lambda: work(targets, files))

    def _in_shares(self, name: str) -> bool:
        return _SHARES.fullmatch(self._files[name][0].name) is not None

    def _read(self, work: Callable[[], Found]) -> Found:
        """Read; what cannot be is one error."""
        try:
            return work()
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder}: cannot be read although its manifest fits: {error}"
            ) from error


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="pt") as tensors:
        names = tensors.keys()
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def _copy_into(targets: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    with safe_open(files[0], framework="pt") as tensors, torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors.get_tensor(name))
