"""A lock on a folder: one process works in it, and the lock ends with that process, however it
ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from flowrl.core.errors import RunError

FILE = ".lock"
# what a file system answers that knows no locks
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderLock:
    """A lock that is held until `release`, or until the process is gone: the system itself lets go
    of it, also after a crash, so nothing has to be cleared away."""

    def __init__(self, handle: int, made: list[Path]) -> None:
        """made: the folders that were made for this lock, the locked one first; maybe none."""
        self._handle = handle
        self._made = made

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the folder; can be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def leave(self, *empty: str) -> None:
        """Let go, and remove the folder where it was made for this lock and nothing came into it
        since but folders of the names `empty` that hold nothing; can be called twice."""
        if self._handle >= 0 and self._made:
            folder = self._made[0]
            # what is not empty stays, and the rest with it
            with contextlib.suppress(OSError):
                there = {path.name for path in folder.iterdir()}
                if there <= {FILE, *empty}:
                    for name in there - {FILE}:
                        (folder / name).rmdir()
                    (folder / FILE).unlink(missing_ok=True)
                    for path in self._made:
                        path.rmdir()
        self.release()


def try_lock(folder: Path) -> FolderLock | None:
    """Lock a folder, which is made if it is not there -> the lock, None where somebody has it.

    The file ``.lock`` in it holds the number of the process. Raises RunError if the folder cannot
    be written.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # who had it before has just removed it
        if error.errno == errno.ENOENT and not os.path.lexists(folder):
            return try_lock(folder)
        reason = os.strerror(errno.ENOTDIR) if error.errno == errno.EEXIST else error.strerror
        raise RunError(f"cannot write to the run folder {folder}: {reason or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            return None
        made = []  # without locks somebody else may work in it
    # who had it before may have removed the folder since its file was opened
    if not _is_file(handle, folder / FILE):
        os.close(handle)
        return try_lock(folder)
    # whose lock it is; a pipe or a device of that name cannot say it
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
    return FolderLock(handle, made)


def _is_file(handle: int, path: Path) -> bool:
    """Say whether an open file is the one of this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def lock(folder: Path, *, mend: str) -> FolderLock:
    """Lock a folder as `try_lock` does. Raises RunError with the way out `mend` where somebody has
    it."""
    found = try_lock(folder)
    if found is None:
        raise RunError(f"{folder}: {_who(folder)} works in it now; {mend}")
    return found


def _who(folder: Path) -> str:
    number, file = "", folder / FILE
    with contextlib.suppress(OSError, ValueError):
        number = file.read_text().strip() if file.is_file() else ""
    return f"process {number}" if number.isdecimal() else "another process"
