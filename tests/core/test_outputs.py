"""What a file that is written may be: standard output, a device, a pipe, a link, a file with
rights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flowrl.cli.output import show_or_write
from flowrl.core.files import is_stdout, replacing, write_json, write_text

WRITE = """
import pathlib, sys
from flowrl.core.files import write_text
print('before', flush=True)
write_text(pathlib.Path(sys.argv[1]), 'text')
print('after')
"""


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_what_a_link_leads_to_is_exchanged(tmp_path: Path) -> None:
    """The links stay, the file behind them is a new one, whole, with its old rights."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "own").write_text("old")
    (tmp_path / "deep" / "own").chmod(0o640)
    (tmp_path / "link").symlink_to("middle")
    (tmp_path / "middle").symlink_to(tmp_path / "deep" / "own")
    before = (tmp_path / "deep" / "own").stat().st_ino
    with replacing(tmp_path / "link") as draft:
        draft.write_text("new")
        assert (tmp_path / "link").read_text() == "old" and draft.parent == tmp_path / "deep"
    after = (tmp_path / "deep" / "own").stat()
    assert (tmp_path / "middle").read_text() == "new" and after.st_ino != before
    assert after.st_mode & 0o777 == 0o640 and (tmp_path / "link").readlink() == Path("middle")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("not-there-yet")
    write_text(tmp_path / "link", "made")
    assert (tmp_path / "not-there-yet").read_text() == "made"
    assert names(tmp_path) == ["deep", "link", "middle", "not-there-yet"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("to", ["pipe", "file"])
def test_standard_output_by_any_name(tmp_path: Path, name: str, to: str) -> None:
    """What was printed before and after stays; a file that a shell opened is not exchanged."""
    out = tmp_path / "out"
    out.touch()
    before = out.stat().st_ino
    with out.open("w") if to == "file" else open(os.devnull) as file:
        stdout = file if to == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", WRITE, name], stdout=stdout, text=True)
    text = out.read_text() if to == "file" else done.stdout
    assert text == "before\ntextafter\n" and done.returncode == 0
    assert out.stat().st_ino == before and names(tmp_path) == ["out"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory here")
def test_a_folder_in_memory_is_a_folder() -> None:
    """/dev/shm is below /dev, and holds files: folders are made there, nothing is left over."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        write_text(Path(place) / "new" / "file.txt", "whole")
        assert (Path(place) / "new" / "file.txt").read_text() == "whole"
        assert [path.name for path in (Path(place) / "new").iterdir()] == ["file.txt"]


def test_a_device_is_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    for name in (tmp_path / "link", Path("/dev/null")):
        write_json(name, {"a": 1})
        assert not is_stdout(name) or os.path.samestat(name.stat(), os.fstat(1))
    assert Path("/dev/null").is_char_device() and (tmp_path / "link").is_symlink()


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    show_or_write("for a person", {"a": 1}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": 1}
