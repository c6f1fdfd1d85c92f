"""Files and folders that are exchanged whole."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from flowrl.core import files
from flowrl.core.errors import RunError
from flowrl.core.files import replacing, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def fill(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "inside.txt").write_text(text)


def test_a_file_is_exchanged_and_missing_folders_are_made(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / "a.json"
    write_json(file, {"a": 1})
    assert file.read_text() == '{\n  "a": 1\n}\n'
    write_text(file, "ä")
    assert file.read_bytes() == b"\xc3\xa4"
    assert names(file.parent) == ["a.json"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_raises_inside_changes_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(kind), replacing(tmp_path / "a") as draft:
        draft.write_text("half")
        assert (tmp_path / "a").read_text() == "old"
        raise kind
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("step", ["_flush", "os.replace"])
def test_a_full_disk_is_one_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(f"flowrl.core.files.{step}", full)
    said = "cannot write the books: No space left on device; nothing half-written was kept"
    with (
        pytest.raises(RunError, match=said),
        replacing(tmp_path / "a", what="the books", durable=True) as draft,
    ):
        draft.write_text("new")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_folders(tmp_path: Path) -> None:
    """An empty folder is filled, also by a link; one that holds something only if asked for."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with replacing(tmp_path / "link") as draft:
        fill(draft, "first")
    assert (tmp_path / "empty" / "inside.txt").read_text() == "first"
    with pytest.raises(RunError, match="not empty"), replacing(tmp_path / "empty") as draft:
        fill(draft, "second")
    assert (tmp_path / "empty" / "inside.txt").read_text() == "first"
    with replacing(tmp_path / "empty", overwrite_folder=True) as draft:
        fill(draft, "second")
    assert (tmp_path / "link" / "inside.txt").read_text() == "second"
    assert names(tmp_path) == ["empty", "link"] and (tmp_path / "link").is_symlink()


def test_a_loop_of_links_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunError, match="cannot write .*loop: Too many levels of symbolic links"):
        write_text(tmp_path / "loop", "text")
    assert (tmp_path / "loop").is_symlink()


def test_links_and_pipes_are_written_in_place(tmp_path: Path) -> None:
    """A link still leads to its file afterwards, and a pipe is still a pipe."""
    (tmp_path / "own").write_text("old")
    (tmp_path / "link").symlink_to("own")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "own").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write_text, args=(tmp_path / "pipe", "through"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "through"
    writer.join()
    assert (tmp_path / "pipe").is_fifo() and names(tmp_path) == ["link", "own", "pipe"]


def test_durable_flushes_all_of_it_before_the_exchange_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []

    def note(path: Path) -> None:
        seen.append((path.name.partition(".tmp")[0], (tmp_path / "c").exists()))

    monkeypatch.setattr(files, "sync", note)
    with replacing(tmp_path / "c", durable=True) as draft:
        fill(draft, "x")
    assert seen == [("inside.txt", False), ("c", False), (tmp_path.name, True)]


@pytest.mark.parametrize("below", ["a.txt", "deep/a.txt"])
def test_a_file_where_a_folder_is_needed(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=f"cannot write .*file/{below}: Not a directory"):
        write_text(tmp_path / "file" / below, "x")


def test_drafts_of_a_killed_process_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    """Names by hand: a draft as `replacing` calls it, one of a run below, and two of a user that
    only look alike."""
    (tmp_path / "run").mkdir()
    names = ["grid.png.tmp-12-0b726d05", "run/c.tmp-12-0b726d05", "a.tmp-x-0b726d05"]
    for name in [*names, "b.tmp-1-0b726d0"]:
        (tmp_path / name).touch()
    files.delete_drafts(tmp_path)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"c.tmp-12-0b726d05", "a.tmp-x-0b726d05", "b.tmp-1-0b726d0"}
