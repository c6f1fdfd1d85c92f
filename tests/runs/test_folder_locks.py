"""Folders that a command made to work in, and left before anything began there."""

from __future__ import annotations

import errno
import fcntl
import shutil
from pathlib import Path

import pytest
from toykit import toy

from flowrl.core.errors import ConfigError
from flowrl.runs.folder import try_lock
from flowrl.runs.start_run import claimed
from flowrl.runs.train import train

pytestmark = pytest.mark.integration


def test_a_folder_in_which_nothing_began_goes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where this command made it and has written nothing; the next try has the same name."""
    monkeypatch.chdir(tmp_path)
    broken = toy(tmp_path, "train.start=nowhere.safetensors")
    before = sorted(tmp_path.iterdir())
    for run in (None, "one/two"):
        with pytest.raises(ConfigError, match="nowhere"):
            train(broken, run, quiet=True)
        assert sorted(tmp_path.iterdir()) == before
    # a folder that was there stays, and so does what somebody put into a new one
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "notes").touch()
    for run in ("one", "one/two"):
        with pytest.raises(ConfigError, match="nowhere"):
            train(broken, run, quiet=True)
    assert (tmp_path / "one" / "notes").exists() and not (tmp_path / "one" / "two").exists()
    for name in ("notes", "samples/000000.png"):
        with claimed(broken, tmp_path / "new", False) as start:
            (start.run / name).touch()
        assert (start.run / name).exists()
        shutil.rmtree(start.run)


def test_a_lock_on_a_folder_that_has_just_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first owner left between opening and locking the file: the lock is on a new one."""
    first, flock = try_lock(tmp_path / "new"), fcntl.flock
    assert first is not None

    def leaving(handle: int, how: int) -> None:
        first.leave()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", leaving)
    second = try_lock(tmp_path / "new")
    assert second is not None and (tmp_path / "new" / ".lock").exists()
    assert try_lock(tmp_path / "new") is None
    second.release()


def test_a_lock_on_a_folder_that_somebody_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first owner left and a third process has it anew: two must not have it."""
    first, flock = try_lock(tmp_path / "new"), fcntl.flock
    assert first is not None
    third = []

    def leaving(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.leave()
        third.append(try_lock(tmp_path / "new"))
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", leaving)
    assert try_lock(tmp_path / "new") is None
    assert third[0] is not None
    third[0].release()


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has none, somebody else may have begun in the folder."""

    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = try_lock(tmp_path / "new"), try_lock(tmp_path / "new")
    assert first is not None and second is not None
    first.leave()
    assert (tmp_path / "new" / ".lock").exists()
    second.release()
