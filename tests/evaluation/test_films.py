"""Videos as film strips and as films: what is written is read again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.evaluation.image_grids import labelled_grid, load_strip, save_strip, some_frames
from flowrl.evaluation.video_files import save_film

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
    """Each frame 8 x 12, twice as large, in its grey and in its place."""
    page = np.asarray(labelled_grid({"before": clips(2, 5)}, ["one", "two"], scale=2))[..., 0]
    for place, grey in enumerate((GREYS[:5] * 255).round().int().tolist()):
        ys, xs = np.nonzero(page[:, -5 * 26 - 20 :] == grey)
        if grey:  # black is also the second video
            assert xs.max() - xs.min() + 1 >= 24 and ys.max() - ys.min() + 1 >= 16, place


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
