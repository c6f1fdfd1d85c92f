"""Videos as files: animated GIF or WebP by PIL, MP4 where OpenCV is installed."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.files import replacing

FPS = 8  # frames per second
KINDS = (".gif", ".webp", ".mp4")
_GAP = 4  # pixels between the videos of a page
_LARGE = 512  # pixels: a longer side of one video is reduced to it


def save_film(videos: Tensor, path: str | os.PathLike[str], *, fps: int = FPS) -> None:
    """Write videos [P, T, 3, H, W] in [0, 1], side by side on pages near a square, as one film: all
    of it or nothing. A GIF has 256 colours a frame.

    Raises DataError if they are no such videos, ConfigError for another kind of file or one that
    nothing here can write, RunError if the file cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in KINDS:
        raise ConfigError(f"{path}: expected a film's name to end in {', '.join(KINDS)}")
    pages = _pages(videos, os.fspath(path))
    # PIL writes animations, but no MP4
    if kind == ".mp4":
        _save_mp4(pages, Path(path), fps)
        return
    images = [Image.fromarray(page) for page in pages]
    options: dict[str, Any] = {"lossless": True} if kind == ".webp" else {"optimize": True}
    # a draft takes the name when it is whole
    with replacing(path) as draft:
        images[0].save(
            draft,
            format=kind[1:].upper(),
            save_all=True,
            append_images=images[1:],
            duration=round(1000 / fps),
            loop=0,
            **options,
        )


def _pages(videos: Tensor, where: str) -> list[np.ndarray]:
    """Lay out each moment of the videos -> T times uint8 [height, width, 3]."""
    if videos.ndim != 5 or videos.shape[2] != 3 or not videos.numel():
        raise DataError(f"{where}: expected videos [P, T, 3, H, W], got {list(videos.shape)}")
    videos = videos.detach().float().cpu()
    if not bool(((videos >= 0) & (videos <= 1)).all()):  # written so that NaN fails too
        raise DataError(f"{where}: expected videos in [0, 1]")
    count, frames, _, height, width = videos.shape
    # larger without smoothing, or every so many pixels
    grown = max(1, 128 // max(height, width))
    step = -(-max(height, width) // _LARGE)
    levels = (videos[..., ::step, ::step] * 255).round().byte()
    levels = levels.repeat_interleave(grown, 3).repeat_interleave(grown, 4)
    height, width = levels.shape[-2:]
    columns = math.ceil(math.sqrt(count))
    rows = -(-count // columns)
    size = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP)
    pages = torch.full((frames, size[0] // 2 * 2, size[1] // 2 * 2, 3), 255, dtype=torch.uint8)
    for place, video in enumerate(levels):
        y, x = (height + _GAP) * (place // columns), (width + _GAP) * (place % columns)
        part = pages[:, y : y + height, x : x + width]
        part.copy_(video.permute(0, 2, 3, 1)[:, : part.shape[1], : part.shape[2]])
    return list(pages.numpy())


def _save_mp4(pages: list[np.ndarray], path: Path, fps: int) -> None:
    try:
        import cv2 as opencv
    except ImportError as error:
        raise ConfigError(
            f"{path}: MP4 files are written by OpenCV, which is not installed; pip install "
            "opencv-python-headless, or take a name that ends in .gif or .webp"
        ) from error
    cv2: Any = opencv
    height, width = pages[0].shape[:2]
    # OpenCV goes by the ending of a name, so the draft needs it
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "film.mp4"
        film = cv2.VideoWriter(str(made), cv2.VideoWriter_fourcc(*"mp4v"), fps, (width, height))
        for page in pages:
            film.write(np.ascontiguousarray(page[:, :, ::-1]))
        film.release()
        if not made.is_file() or not made.stat().st_size:
            raise RunError(f"{path}: OpenCV could not write an MP4; take .gif or .webp")
        with replacing(path) as draft:
            Path(draft).write_bytes(made.read_bytes())
