"""Images set into grids: what stands where, and that no pixel is changed."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gridkit import Color, box, ink, plain, size
from PIL import Image
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.evaluation.image_grids import (
    RIGHT,
    WRONG,
    labelled_grid,
    load_strip,
    pairs_figure,
    save_strip,
)

RED: Color = (255, 0, 0)
BLUE: Color = (0, 0, 255)


def test_grid_puts_prompts_down_and_columns_across() -> None:
    colors: list[Color] = [RED, (0, 255, 0), BLUE, (255, 255, 0)]
    columns = {"before": plain(*colors[:2]), "iter 20": plain(*colors[2:])}
    grid = labelled_grid(columns, ["first", "second"], scale=12)
    boxes = [box(grid, color) for color in colors]
    assert {size(b) for b in boxes} == {(96, 96)}  # 8 pixels x 12, each a clean square
    assert boxes[0][0] == boxes[1][0] < boxes[2][0] == boxes[3][0]
    assert boxes[0][1] == boxes[2][1] < boxes[1][1] == boxes[3][1]
    corners = {grid.getpixel((0, 0)), grid.getpixel((grid.width - 1, grid.height - 1))}
    assert corners == {(255, 255, 255)} and boxes[2][2] <= grid.width
    for left, top, _, bottom in boxes[:2]:
        assert ink(grid, 0, top, left - 2, bottom)  # the prompt beside its row
    for left, top, right, _ in boxes[::2]:
        assert ink(grid, left, 0, right, top - 2)  # a header above each column


def test_grid_keeps_every_pixel_of_a_sample() -> None:
    """Random pixels behind a marked corner, found by it; each is a square of 2."""
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    images[1, :, 0, 0] = 0
    images[1, :, 0, 1:9] = torch.tensor([1.0, 0, 1])[:, None]
    grid = np.asarray(labelled_grid({"x": images}, ["a", "b"], scale=2))
    tile = (images[1] * 255).round().byte().permute(1, 2, 0).numpy().repeat(2, 0).repeat(2, 1)
    ys, xs = np.nonzero((grid == (255, 0, 255)).all(-1))
    y, x = ys.min(), xs.min() - 2
    np.testing.assert_array_equal(grid[y : y + 128, x : x + 128], tile)


def test_what_was_judged_is_framed() -> None:
    """Blue images: the frame's colour one pixel outside of each, no other pixel of these colours
    where nobody judged."""
    columns = {"before": plain(BLUE, BLUE), "after": plain(BLUE, BLUE)}
    right = {"after": [True, False]}
    grid = np.asarray(labelled_grid(columns, ["a", "b"], scale=12, right=right))
    blue = (grid == BLUE).all(-1)
    rows, lefts = np.flatnonzero(blue.any(1)), np.flatnonzero(blue.any(0))
    first, second = rows[0], rows[96]
    left, after = lefts[0], lefts[96]
    assert tuple(grid[first - 1, after + 5]) == tuple(grid[first + 5, after - 3]) == RIGHT
    assert tuple(grid[second - 1, after + 5]) == tuple(grid[second + 5, after - 3]) == WRONG
    assert tuple(grid[first - 1, left + 5]) not in (RIGHT, WRONG)


@pytest.mark.parametrize(
    ("height", "width", "shown"),
    [(64, 64, (128, 128)), (48, 48, (96, 96)), (512, 256, (128, 256)), (200, 200, (200,) * 2)],
)
def test_default_size_of_images(height: int, width: int, shown: tuple[int, int]) -> None:
    grid = labelled_grid({"x": plain((9, 200, 9), height=height, width=width)}, ["p"])
    assert size(box(grid, (9, 200, 9))) == shown


def test_headers_stand_in_the_given_order() -> None:
    wide, thin = "mmmmmm", "i"
    for names in ((wide, thin), (thin, wide)):
        grid = labelled_grid({n: plain((255, 0, i)) for i, n in enumerate(names)}, ["p"], scale=12)
        cells = [box(grid, (255, 0, i)) for i in range(2)]
        amounts = [ink(grid, cell[0], 0, cell[2], cell[1] - 2) for cell in cells]
        assert (amounts[0] > amounts[1]) == (names[0] == wide)


def test_a_long_prompt_stays_within_its_row() -> None:
    for text in ("word " * 200, "x" * 900, "ä€ж " * 200):
        grid = labelled_grid({"x": plain(RED, BLUE)}, [text, ""], scale=12)
        first, second = box(grid, RED), box(grid, BLUE)
        assert ink(grid, 0, first[1], first[0] - 2, first[3]) > 200
        assert ink(grid, 0, second[1], second[0] - 2, second[3]) == 0
        assert first[0] < 250  # 20 margin + 170 label + 16 gap, and no wider for longer texts


TWO = plain((1, 1, 1), (2, 2, 2))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no images"),
        ({"x": plain((1, 1, 1))}, "2 prompts, got 1"),
        ({"x": TWO, "y": plain((1, 1, 1), (2, 2, 2), width=9)}, "one size"),
        ({"x": TWO + 1}, r"column 'x': expected images in \[0, 1\].* to 1.0"),
        ({"x": torch.full((2, 3, 8, 8), math.nan)}, "to nan"),
        ({"x": torch.zeros(2, 8, 8)}, r"\[P, 3, H, W\], got \[2, 8, 8\]"),
    ],
)
def test_grid_refuses_what_is_no_grid(columns: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        labelled_grid(columns, ["a", "b"])


@pytest.mark.parametrize(("count", "blocks", "shown"), [(6, 3, 3), (5, 3, 3), (6, 4, 3), (2, 4, 2)])
def test_pairs_run_down_a_block_then_to_the_next(count: int, blocks: int, shown: int) -> None:
    before: list[Color] = [(255, i, 0) for i in range(count)]
    after: list[Color] = [(0, i, 255) for i in range(count)]
    texts = [f"prompt {i}" for i in range(count)]
    page = pairs_figure(plain(*before), plain(*after), texts, title="A title", blocks=blocks)
    left = [box(page, color) for color in before]
    right = [box(page, color) for color in after]
    rows = -(-count // shown)
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a[1] == b[1] == left[i % rows][1] and a[2] < b[0] < a[2] + 10
        assert a[0] == left[i - i % rows][0]
        assert ink(page, a[0], a[3] + 3, b[2], a[3] + 30)  # the prompt under the pair
    starts = [a[0] for a in left]
    assert len(set(starts)) == shown and starts == sorted(starts)
    assert ink(page, 0, 0, page.width, 45)  # the title


def test_strip_round_trip_and_atomic_write(tmp_path: Path) -> None:
    """120 values, all of them exact in 8 bits."""
    images, path = torch.arange(120).reshape(2, 3, 4, 5) / 255, tmp_path / "deep" / "000000.png"
    save_strip(images, path)
    assert Image.open(path).size == (5, 8) and torch.equal(load_strip(path, 2), images)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"000000.png: expected images in \[0, 1\]"):
        save_strip(images + 1, path)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == ["000000.png"]
    with pytest.raises(RunError, match="expected 3 images of one height, got 8 rows"):
        load_strip(path, 3)
    path.write_bytes(before[:40])
    with pytest.raises(RunError, match="000000.png: expected a PNG of 2"):
        load_strip(path, 2)
    with pytest.raises(RunError, match="cannot write"):
        save_strip(images, path / "below-a-file.png")
