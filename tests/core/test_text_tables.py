"""Tables that fit a terminal and stay whole in a file, and numbers as a person reads them."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from flowrl.core.tables import (
    fit,
    flop,
    markdown_table,
    parameter_count,
    size,
    terminal_width,
    text_table,
)

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
