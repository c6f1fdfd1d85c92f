"""The JPEG reward against Pillow's own files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import batch_of, pil
from PIL import Image
from torch import Tensor

from rewards.jpeg import jpeg

NOISE = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
RAMP = torch.linspace(0, 1, 64).expand(3, 48, 64)
IMAGES = torch.stack([torch.full((3, 48, 64), 0.3), RAMP, NOISE])
BATCH = batch_of(IMAGES, [""] * 3)


def _kilobytes(images: Tensor, folder: Path, **options: Any) -> Tensor:
    """Save by way of PNG, as a user would check it: sizes of files in units of 1000 bytes."""
    sizes = []
    for image in images:
        pil(image).save(folder / "x.png")
        Image.open(folder / "x.png").convert("RGB").save(folder / "x.jpg", **options)
        sizes.append((folder / "x.jpg").stat().st_size / 1000)
    return torch.tensor(sizes)


@pytest.mark.parametrize("quality", [95, 60])
def test_sizes_are_those_of_pillows_files(tmp_path: Path, quality: int) -> None:
    sizes = _kilobytes(IMAGES, tmp_path, quality=quality)
    assert sizes[0] < sizes[1] < sizes[2]
    assert torch.equal(jpeg(quality=quality)(BATCH), -sizes)
    assert torch.equal(jpeg(quality=quality, goal="incompressibility")(BATCH), sizes)
    scaled = jpeg(quality=quality, scale=500.0)(BATCH)
    torch.testing.assert_close(scaled, -sizes / 500, rtol=1e-6, atol=0)


def test_the_defaults_are_ddpos_compressibility(tmp_path: Path) -> None:
    """Quality 95 and 4:2:0 as in all public code; 4:4:4 makes a larger file of coloured noise."""
    halved = _kilobytes(IMAGES, tmp_path, quality=95, subsampling="4:2:0")
    full = _kilobytes(IMAGES, tmp_path, quality=95, subsampling="4:4:4")
    assert halved[2] < full[2] and torch.equal(jpeg()(BATCH), -halved)
    assert _kilobytes(IMAGES, tmp_path, quality=10)[2] < 0.5 * halved[2]


def test_images_are_cut_at_the_range() -> None:
    wide = IMAGES * 3 - 1
    cut = jpeg()(BATCH._replace(images=wide.clamp(0, 1)))
    assert torch.equal(jpeg()(BATCH._replace(images=wide)), cut)
