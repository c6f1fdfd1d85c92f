"""Which cell of a grid a text belongs to, and labels that name another one."""

from __future__ import annotations

import pytest

from flowrl.core.errors import DataError
from rewards._common.cells import cell_texts

ROWS = ("[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]")
FOUR = ("LEFT", "MIDDLE-LEFT", "MIDDLE-RIGHT", "RIGHT")  # PaCo-RL's columns, where there are four
NINE = (
    *("TOP-LEFT", "TOP-CENTER", "TOP-RIGHT", "MIDDLE-LEFT", "CENTER", "MIDDLE-RIGHT"),
    *("BOTTOM-LEFT", "BOTTOM-MIDDLE", "BOTTOM-RIGHT"),
)


def read(labels: tuple[str, ...], grid: tuple[int, int]) -> list[str]:
    parts = [f"{label}: text {number}." for number, label in enumerate(labels)]
    return cell_texts(f"A set. {' '.join(parts)}", grid, "line 3", "rewards.clip")


@pytest.mark.parametrize(
    ("labels", "grid"),
    [
        (ROWS, (2, 2)),
        (FOUR, (1, 4)),
        (NINE, (3, 3)),
        (tuple(f"[TOP]-[{name}]" for name in FOUR), (1, 4)),
        (("[LEFT]", "[MIDDLE]", "[RIGHT]"), (1, 3)),
        (("TOP", "CENTRE", "BOTTOM"), (3, 1)),
        (("TOP-CENTER", "BOTTOM-CENTER"), (2, 1)),
        (("LEFT", "RIGHT", "LEFT", "RIGHT"), (2, 2)),
        # no places: whatever their order
        (("B2", "A1", "[D]", "1"), (2, 2)),
        (("[RIGHTS]", "[LEFTOVERS]"), (1, 2)),
    ],
)
def test_texts_belong_to_cells_row_by_row(labels: tuple[str, ...], grid: tuple[int, int]) -> None:
    assert read(labels, grid) == [f"text {number}." for number in range(len(labels))]


@pytest.mark.parametrize(
    ("labels", "grid", "said"),
    [
        (ROWS[::-1], (2, 2), r"got \[BOTTOM\]-\[RIGHT\] for row 1, column 1"),
        ((ROWS[0], ROWS[2], ROWS[1], ROWS[3]), (2, 2), r"\[BOTTOM\]-\[LEFT\] for row 1, column 2"),
        (("RIGHT", "LEFT"), (1, 2), "got RIGHT for row 1, column 1"),
        (("BOTTOM", "TOP"), (2, 1), "got BOTTOM for row 1, column 1"),
        (("LEFT", "RIGHT", "MIDDLE"), (1, 3), "got RIGHT for row 1, column 2"),
        (("A", "B", "MIDDLE"), (1, 3), "got MIDDLE for row 1, column 3"),
        (("TOP-CENTER", *"BCDEFGHI"), (3, 3), "got TOP-CENTER for row 1, column 1"),
        ((FOUR[1], FOUR[0], *FOUR[2:]), (1, 4), "got MIDDLE-LEFT for row 1, column 1"),
    ],
)
def test_a_label_of_another_place_is_refused(
    labels: tuple[str, ...], grid: tuple[int, int], said: str
) -> None:
    with pytest.raises(DataError, match=f"line 3: rewards.clip: .*row by row.*{said}"):
        read(labels, grid)
