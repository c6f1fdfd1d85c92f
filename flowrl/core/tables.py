"""Tables and numbers as a person reads them: as wide as the terminal, and whole where there is
none."""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import JustifyMethod

_PIPED = 100_000  # columns of a page that nobody looks at: wide enough that nothing is ever folded
# Columns two spaces apart, one rule below the head, and rules where a table asks for them.
_BOX = "    \n    \n -- \n    \n -- \n -- \n    \n    \n"


def fixed_digits(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """Set a number with so many digits; what rounds to zero has no minus."""
    rounded = round(value, digits) + 0.0  # turns -0.0 into 0.0
    return f"{rounded:+.{digits}f}" if sign else f"{rounded:.{digits}f}"


def interval_text(ends: Sequence[float | None], digits: int = 3, *, sign: bool = False) -> str:
    """Set both ends of an interval, "0.250 to 0.500"; "unknown" where one is None."""
    known = []
    for end in ends:
        if end is None:
            return "unknown"
        known.append(fixed_digits(end, digits, sign=sign))
    return " to ".join(known)


def terminal_width() -> int | None:
    """Return the columns of the terminal behind stdout; None where stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Sequence[Sequence[str]],
    *,
    left: int | Collection[int] = 1,
    rules: Collection[int] = (),
    width: int | None = None,
) -> str:
    """Align rows of texts, the head first.

    The first `left` columns, or those so numbered, stand on the left, the others on the right.
    `rules` are the rows with a line below them, beside the head. Without a `width` (a file, a pipe)
    every row is one line, plain and whole. In a terminal of `width` columns a table of figures that
    is too wide goes on below itself, with its first column again; other long cells go on in the
    next line.
    """
    texts = range(left) if isinstance(left, int) else left
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or len(texts) > 1:
        return _drawn(rows, texts, rules, width)
    blocks = _blocks(widths, width)
    parts = []
    for block in blocks:
        parts.append(_drawn(_narrowed(rows, block), texts, rules, width))
    return "\n\n".join(parts)


def indented_table(
    rows: Sequence[Sequence[str]],
    columns: int,
    *,
    left: int | Collection[int] = 1,
    width: int | None = None,
) -> list[str]:
    """Draw a `text_table` to the right of so many empty columns -> its lines. In a terminal of
    `width` columns it takes what is left of them, at least 20."""
    if width is not None:
        width = max(width - columns, 20)
    drawn = text_table(rows, left=left, width=width)
    return textwrap.indent(drawn, " " * columns).splitlines()


def _narrowed(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> list[list[str]]:
    out = []
    for row in rows:
        out.append([row[column] for column in columns])
    return out


def _blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Deal the columns out to tables that fit; each begins with the first column."""
    blocks = [[0]]
    for column in range(1, len(widths)):
        used = sum(widths[i] + 2 for i in blocks[-1]) + widths[column]
        if used > width and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    return blocks


def _drawn(
    rows: Sequence[Sequence[str]],
    texts: Collection[int],
    rules: Collection[int],
    width: int | None,
) -> str:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # one column per cell of the head; a long word is folded, never cut
    bold = "bold" if width is not None else ""
    table = Table(box=Box(_BOX, ascii=True), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(rows[0]):
        side: JustifyMethod = "left" if number in texts else "right"
        table.add_column(Text(name), justify=side, overflow="fold", header_style=bold)
    for number, row in enumerate(rows[1:], start=1):
        table.add_row(*map(Text, row), end_section=number in rules)
    # drawn into memory, so that the text can stand between other texts
    out = io.StringIO()
    terminal = width is not None
    Console(file=out, width=width or _PIPED, force_terminal=terminal).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def markdown_table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Set rows of texts as a Markdown table: the first `left` columns left, the others right."""
    lines = []
    for row in rows:
        escaped = [cell.replace("|", "\\|").replace("*", "\\*") for cell in row]
        lines.append(f"| {' | '.join(escaped)} |")
    rule = "|" + "---|" * left + "---:|" * (len(rows[0]) - left)
    return "\n".join([lines[0], rule, *lines[1:]])


def fit(text: str, width: int | None) -> str:
    """Fold the lines of a text into `width` columns; None leaves them as they are.

    What is folded goes on below the last column of its line: behind the last run of two or more
    spaces, as in ``memory     weights    1.2 GiB  of the network``.
    """
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _folded(line, width))


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or "\x1b" in line:  # a table's line with bold letters fits already
        return [line]
    indent = 0
    for match in re.finditer(r"\s{2,}(?=\S)", line):
        if match.end() <= 2 * width // 3:
            indent = match.end()
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def size(count: int) -> str:
    """Write bytes as a person reads them: 1.5 GiB, 12.0 MiB."""
    unit, power = "KiB", 10
    if count >= 2**30:
        unit, power = "GiB", 30
    elif count >= 2**20:
        unit, power = "MiB", 20
    return f"{count / 2**power:,.1f} {unit}"


def parameter_count(count: int) -> str:
    """Write a number of parameters as a person reads it: 2.24 B, 84 M, 512."""
    for unit, power in (("B", 9), ("M", 6), ("K", 3)):
        if count >= 10**power:
            value = count / 10**power
            digits = (value < 10) + (value < 100)  # three figures in all
            return f"{value:.{digits}f} {unit}"
    return str(count)


def flop(count: int) -> str:
    """Write floating-point operations: 2.5 TFLOP, 12.0 PFLOP."""
    for unit, power in (("EFLOP", 18), ("PFLOP", 15), ("TFLOP", 12)):
        if count >= 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count / 1e9:,.3g} GFLOP"
