"""Files and folders that are exchanged whole, what is written where, and tables that fit a
terminal and stay whole in a file."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flowrl.cli.output import show_or_write
from flowrl.core import files
from flowrl.core.errors import RunError
from flowrl.core.files import finite_or_none, is_stdout, replacing, write_json, write_text
from flowrl.core.tables import (
    fit,
    flop,
    indented_table,
    markdown_table,
    parameter_count,
    size,
    terminal_width,
    text_table,
)


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def fill(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "inside.txt").write_text(text)


def test_a_file_is_exchanged_and_missing_folders_are_made(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / "a.json"
    write_json(file, {"a": 1})
    assert file.read_text() == '{"a": 1}\n'
    write_text(file, "ä")
    assert file.read_bytes() == b"\xc3\xa4"
    assert names(file.parent) == ["a.json"]


def test_json_is_indented_where_a_line_is_too_short(tmp_path: Path) -> None:
    file, numbers = tmp_path / "a.json", [*range(60), None, True, 0.5]
    value = {1: numbers, "ä": {"short": [{"b": ()}], "text": "x" * 100}, "tasks": ("y" * 60,) * 2}
    value |= {"fits": {"a": "z" * 80}, "fits?": {"a": "z" * 80}}  # 100 columns with the comma, 101
    write_json(file, value)
    assert json.loads(file.read_text()) == json.loads(json.dumps(value))
    assert file.read_text().splitlines() == [
        "{",
        f'  "1": {json.dumps(numbers)},',
        '  "\\u00e4": {',
        '    "short": [{"b": []}],',
        f'    "text": "{"x" * 100}"',
        "  },",
        '  "tasks": [',
        f'    "{"y" * 60}",',
        f'    "{"y" * 60}"',
        "  ],",
        f'  "fits": {{"a": "{"z" * 80}"}},',
        '  "fits?": {',
        f'    "a": "{"z" * 80}"',
        "  }",
        "}",
    ]


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


# ------------------------------------------------------------------------------------------- tables


ROWS = [
    ["method", "lr", "gain [95 %]"],
    ["a method with a long name", "0.0001", "+1.0 [-2.0, 3.0]*"],
    ["base", "", "[bold]"],
]


def test_a_table_without_a_width_is_plain_and_whole() -> None:
    """Written by hand: columns two apart, numbers right, no markup read, no blanks at the end."""
    assert text_table(ROWS, rules=(1,)).splitlines() == [
        "method                         lr        gain [95 %]",
        "----------------------------------------------------",
        "a method with a long name  0.0001  +1.0 [-2.0, 3.0]*",
        "----------------------------------------------------",
        "base                                          [bold]",
    ]
    wide = text_table([["x" * 300, "y" * 300], ["1", "2"]], left=2)
    assert wide.splitlines()[0] == "x" * 300 + "  " + "y" * 300


@pytest.mark.parametrize("width", [20, 30, 40, 60])
@pytest.mark.parametrize("left", [1, 3])
def test_a_table_fits_the_terminal_and_loses_no_letter(width: int, left: int) -> None:
    """Of figures the first column may come again; of texts every letter is there once."""
    table = re.sub(r"\x1b\[\d*m", "", text_table(ROWS, left=left, width=width))
    assert max(map(len, table.splitlines())) <= width
    there, wanted = (Counter(re.sub(r"[\s-]", "", text)) for text in (table, text_table(ROWS)))
    assert there >= wanted if left == 1 else there == wanted


def test_figures_that_are_too_wide_go_on_below() -> None:
    """The names take 25 columns, the rates 6, the gains 17, and two are between columns."""
    table = re.sub(r"\x1b\[\d*m", "", text_table(ROWS, width=46)).splitlines()
    assert [line.split("  ")[0] for line in table] == [
        *("method", "-" * 33, "a method with a long name", "base", ""),
        *("method", "-" * 44, "a method with a long name", "base"),
    ]
    assert table[2].endswith("  0.0001") and table[7].endswith("  +1.0 [-2.0, 3.0]*")


def test_a_table_is_set_in_from_the_margin() -> None:
    """What `text_table` draws in the columns that are left, and 20 where there are fewer."""
    beside = text_table(ROWS, width=46).splitlines()
    expected = ["    " + line if line else "" for line in beside]
    assert indented_table(ROWS, 4, width=50) == expected and "" in expected
    narrow = text_table(ROWS, width=20).splitlines()
    assert [line.strip() for line in indented_table(ROWS, 4, width=10)] == narrow
    assert indented_table(ROWS, 2)[0] == "  " + text_table(ROWS).splitlines()[0]


def test_there_is_no_terminal_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal_width() is None


def test_lines_are_folded_below_their_last_column() -> None:
    line = "memory     weights    1.2 GiB  of the network and of its adapters"
    assert fit(line, None) == line == fit(line, 80)
    assert fit(line, 40).splitlines() == [
        "memory     weights    1.2 GiB  of the",
        "                      network and of its",
        "                      adapters",
    ]
    assert fit("  short\n\nnext", 10) == "  short\n\nnext"


def test_a_markdown_table() -> None:
    assert markdown_table([["a|b", "c"], ["d", "1*"]]) == "| a\\|b | c |\n|---|---:|\n| d | 1\\* |"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (size(512), "0.5 KiB"),
        (size(3 * 2**19), "1.5 MiB"),
        (size(5 * 2**30), "5.0 GiB"),
        (parameter_count(2_243_171_520), "2.24 B"),
        (parameter_count(83_819_683), "83.8 M"),
        (parameter_count(11_901_408_320), "11.9 B"),
        (parameter_count(512), "512"),
        (flop(2 * 10**15), "2.0 PFLOP"),
        (flop(45 * 10**11), "4.5 TFLOP"),
        (flop(10**8), "0.1 GFLOP"),
    ],
)
def test_numbers_as_a_person_reads_them(written: str, text: str) -> None:
    assert written == text


WRITE = """
import pathlib, sys
from flowrl.core.files import write_text
print('before', flush=True)
write_text(pathlib.Path(sys.argv[1]), 'text')
print('after')
"""


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (1.5, 1.5), (None, None), (np.float64(0.5), 0.5), (np.nan, None), (-np.inf, None)],
)
def test_a_number_as_json_has_it(value: float | None, expected: float | None) -> None:
    found = finite_or_none(value)
    assert found == expected and type(found) is type(expected)


def test_json_on_standard_output_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    show_or_write("for a person", {"a": 1}, Path("-"))
    assert json.loads(capsys.readouterr().out) == {"a": 1}
