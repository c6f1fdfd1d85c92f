"""Images set into grids, videos as files, and the look of images in numbers: what stands where, and
that no pixel is changed."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gridkit import Color, box, ink, plain, size
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.evaluation.image_grids import (
    RIGHT,
    WRONG,
    labelled_grid,
    load_strip,
    save_strip,
    some_frames,
)
from flowrl.evaluation.reward_set import (
    grid_energy,
    looks_of,
    prompt_entropy,
    saturation,
    sharpness,
)
from flowrl.evaluation.velocity_drift import Given, take, velocity_drift
from flowrl.evaluation.video_files import save_film
from flowrl.models.toy import LinearFlow

RED: Color = (255, 0, 0)
BLUE: Color = (0, 0, 255)


def test_grid_puts_prompts_down_and_columns_across() -> None:
    colors: list[Color] = [RED, (0, 255, 0), BLUE, (255, 255, 0)]
    columns = {"before": plain(*colors[:2]), "iter 20": plain(*colors[2:])}
    grid = labelled_grid(columns, ["first", "second"])
    boxes = [box(grid, color) for color in colors]
    assert {size(b) for b in boxes} == {(128, 128)}  # 8 pixels x 16, each a clean square
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
    grid = np.asarray(labelled_grid({"x": images}, ["a", "b"]))
    tile = (images[1] * 255).round().byte().permute(1, 2, 0).numpy().repeat(2, 0).repeat(2, 1)
    ys, xs = np.nonzero((grid == (255, 0, 255)).all(-1))
    y, x = ys.min(), xs.min() - 2
    np.testing.assert_array_equal(grid[y : y + 128, x : x + 128], tile)


def test_what_was_judged_is_framed() -> None:
    """Blue images: the frame's colour one pixel outside of each, no other pixel of these colours
    where nobody judged."""
    columns = {"before": plain(BLUE, BLUE), "after": plain(BLUE, BLUE)}
    right = {"after": [True, False]}
    grid = np.asarray(labelled_grid(columns, ["a", "b"], right=right))
    blue = (grid == BLUE).all(-1)
    rows, lefts = np.flatnonzero(blue.any(1)), np.flatnonzero(blue.any(0))
    first, second = rows[0], rows[128]
    left, after = lefts[0], lefts[128]
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
        grid = labelled_grid({n: plain((255, 0, i)) for i, n in enumerate(names)}, ["p"])
        cells = [box(grid, (255, 0, i)) for i in range(2)]
        amounts = [ink(grid, cell[0], 0, cell[2], cell[1] - 2) for cell in cells]
        assert (amounts[0] > amounts[1]) == (names[0] == wide)


def test_a_long_prompt_stays_within_its_row() -> None:
    for text in ("word " * 200, "x" * 900, "ä€ж " * 200):
        grid = labelled_grid({"x": plain(RED, BLUE)}, [text, ""])
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


GREYS = torch.linspace(0, 1, 11)


def clips(count: int, frames: int) -> Tensor:
    """Return videos whose frame t is grey t / 10, but the last video's, which is black."""
    videos = GREYS[:frames, None, None, None].expand(count, frames, 3, 8, 12).clone()
    videos[-1] = 0
    return videos


def test_a_strip_of_videos_holds_some_frames(tmp_path: Path) -> None:
    """Six of eleven: the first, the last, and every second between."""
    videos = clips(2, 11)
    save_strip(videos, tmp_path / "a.png")
    again = load_strip(tmp_path / "a.png", 2, 12)
    assert again.shape == (2, 6, 3, 8, 12)
    torch.testing.assert_close(again[0, :, 0, 0, 0], GREYS[::2], rtol=0, atol=0.5 / 255)
    assert torch.equal(some_frames(videos)[1], again[1])
    assert load_strip(tmp_path / "a.png", 2).shape == (2, 3, 8, 72)
    assert some_frames(clips(1, 3)).shape[1] == 3


def test_a_grid_shows_videos_as_film_strips() -> None:
    """Each frame 8 x 12, ten times as large, in its grey and in its place."""
    page = np.asarray(labelled_grid({"before": clips(2, 5)}, ["one", "two"]))[..., 0]
    for place, grey in enumerate((GREYS[:5] * 255).round().int().tolist()):
        ys, xs = np.nonzero(page[:, -5 * 122 - 20 :] == grey)
        if grey:  # black is also the second video
            assert xs.max() - xs.min() + 1 >= 120 and ys.max() - ys.min() + 1 >= 80, place


@pytest.mark.parametrize("kind", ["gif", "webp", "mp4"])
def test_a_film_has_every_frame(tmp_path: Path, kind: str) -> None:
    """Greys of the first video, read again: GIF and WebP to the level, MP4 to 6,
    which its codec loses."""
    if kind == "mp4" and importlib.util.find_spec("cv2") is None:
        pytest.skip("OpenCV is not installed")
    file = tmp_path / f"film.{kind}"
    save_film(clips(3, 11), file)
    if kind == "mp4":
        cv2 = importlib.import_module("cv2")
        film, frames = cv2.VideoCapture(str(file)), []
        while (read := film.read())[0]:
            frames.append(read[1])
    else:
        with Image.open(file) as film:
            frames = []
            for place in range(film.n_frames):  # type: ignore[attr-defined]
                film.seek(place)
                frames.append(np.asarray(film.convert("RGB")))
    assert len(frames) == 11
    found = [int(frame[20, 20, 0]) for frame in frames]
    expected = (GREYS * 255).round().int().tolist()
    assert np.abs(np.subtract(found, expected)).max() <= (6 if kind == "mp4" else 0)


def test_what_is_no_film(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end in .gif, .webp, .mp4"):
        save_film(clips(1, 2), tmp_path / "film.avi")
    with pytest.raises(DataError, match=r"expected videos \[P, T, 3, H, W\]"):
        save_film(clips(1, 2)[0], tmp_path / "film.gif")
    with pytest.raises(DataError, match=r"expected videos in \[0, 1\]"):
        save_film(20 * clips(2, 4), tmp_path / "film.gif")


def stripes(period: int, size: int = 40) -> torch.Tensor:
    """Return an image [1, 3, size, size] with a bright column every `period` pixels."""
    image = torch.zeros(1, 3, size, size)
    image[..., ::period] = 1
    return image


def test_looks_by_hand() -> None:
    grey, red = torch.full((1, 3, 16, 16), 0.3), torch.zeros(1, 3, 16, 16)
    red[:, 0] = 1
    assert saturation(torch.cat([grey, red])).tolist() == [0, 1]
    assert sharpness(grey).tolist() == [0] and grid_energy(grey).tolist() == [0]
    # one bright pixel: |-4| on it and 1 on each of four neighbours, of 14 x 14 inside
    dot = torch.zeros(1, 3, 16, 16)
    dot[..., 8, 8] = 1
    assert sharpness(dot).item() == pytest.approx(8 / 14**2)


def test_grid_energy() -> None:
    """Columns 8 apart have all of their energy at multiples of 1/8 along one axis, and none along
    the other; columns 5 apart share no frequency with them but the mean and 1 (in 40 pixels)."""
    assert grid_energy(stripes(8)).item() == pytest.approx(0.5)
    checks = torch.maximum(stripes(8), stripes(8).transpose(2, 3))
    assert grid_energy(checks).item() == pytest.approx(1.0)
    assert grid_energy(stripes(5)).item() == pytest.approx(0.0, abs=1e-9)
    # white noise spreads it over all 20 frequencies, of which 4 are multiples
    noise = torch.rand(400, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    assert grid_energy(noise).mean().item() == pytest.approx(0.2, abs=0.03)


def test_the_first_finished_image_of_each_prompt_is_looked_at() -> None:
    images = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    images[2, 0] = 255  # the second prompt's first finished image
    images[0, 0] = 255  # not finished
    looks = looks_of(images, torch.tensor([0, 0, 1, 1, 0]), torch.tensor([1, 0, 0, 0, 0]))
    assert looks[:, 0].tolist() == [0, 1] and looks.shape == (2, 3)


def test_drift_of_a_scaled_velocity() -> None:
    """The toy's velocity is linear in its parameters: 1.5 times them moves it by half its size."""
    model = LinearFlow(scale=0.3)
    probe = take(model, Given(["a red dot", "a blue dot"]), height=16, width=16, steps=4, seed=0)
    assert len(probe.x) == 4 and velocity_drift(model, probe) == 0
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.mul_(1.5)
    assert velocity_drift(model, probe) == pytest.approx(0.5, rel=1e-5)


def test_prompt_entropy() -> None:
    """Shares 1/2, 1/4 and 1/4: 1.5 bits of log2(3)."""
    group = torch.tensor([0, 0, 1, 2])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert prompt_entropy(advantage, group) == pytest.approx(1.5 / math.log2(3))
    assert prompt_entropy(torch.tensor([1.0, 1, 2, 2]), group) == pytest.approx(1.0)
    assert prompt_entropy(torch.tensor([0.0, 0, 2, 0]), group) == 0
    assert (
        prompt_entropy(torch.zeros(4), group) == 0 == 1 - prompt_entropy(torch.ones(2), group[:2])
    )
