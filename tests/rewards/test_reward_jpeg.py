"""The JPEG reward against Pillow's own files on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from rewards.jpeg import jpeg

NOISE = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
RAMP = torch.linspace(0, 1, 64).expand(3, 48, 64)
SOLID = torch.full((3, 48, 64), 0.3)
IMAGES = torch.stack([SOLID, RAMP, NOISE])


def _batch(images: Tensor) -> RewardBatch:
    n = len(images)
    return RewardBatch(images, [""] * n, torch.arange(n), [{}] * n, torch.zeros(n))


def _kilobytes(images: Tensor, folder: Path, **options: Any) -> list[float]:
    """Save by way of PNG, as a user would check it: the sizes of files on disk in units of 1000
    bytes."""
    sizes = []
    for image in images:
        rows = [
            tuple(int(v) for v in pixel) for pixel in (image * 255).round().flatten(1).T.tolist()
        ]
        one = Image.new("RGB", (image.shape[2], image.shape[1]))
        one.putdata(rows)
        one.save(folder / "x.png")
        Image.open(folder / "x.png").convert("RGB").save(folder / "x.jpg", **options)
        sizes.append((folder / "x.jpg").stat().st_size / 1000)
    return sizes


@pytest.mark.parametrize("quality", [95, 60])
def test_sizes_are_those_of_pillows_files(tmp_path: Path, quality: int) -> None:
    sizes = torch.tensor(_kilobytes(IMAGES, tmp_path, quality=quality))
    assert sizes[0] < sizes[1] < sizes[2]
    assert torch.equal(jpeg(quality=quality)(_batch(IMAGES)), -sizes)
    assert torch.equal(jpeg(quality=quality, goal="incompressibility")(_batch(IMAGES)), sizes)
    torch.testing.assert_close(
        jpeg(quality=quality, scale=500.0)(_batch(IMAGES)), -sizes / 500, rtol=1e-6, atol=0
    )


def test_the_defaults_are_ddpos_compressibility() -> None:
    scorer = jpeg()
    assert torch.equal(scorer(_batch(IMAGES)), jpeg(quality=95, scale=1)(_batch(IMAGES)))


def test_chroma_is_halved_as_by_default(tmp_path: Path) -> None:
    # 4:2:0 in all public code; 4:4:4 makes a larger file of coloured noise.
    default, full = (
        _kilobytes(NOISE[None], tmp_path, quality=95, subsampling=s)[0] for s in ("4:2:0", "4:4:4")
    )
    assert default < full and jpeg()(_batch(NOISE[None])).item() == pytest.approx(
        -default, abs=1e-6
    )


def test_quality_orders_sizes() -> None:
    sizes = [
        jpeg(quality=q, goal="incompressibility")(_batch(NOISE[None])).item() for q in (10, 50, 95)
    ]
    assert sizes == sorted(sizes) and sizes[0] < 0.5 * sizes[2]


def test_images_are_cut_at_the_range() -> None:
    assert torch.equal(jpeg()(_batch(IMAGES * 3 - 1)), jpeg()(_batch((IMAGES * 3 - 1).clamp(0, 1))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"goal": "small"}, "goal"),
        ({"quality": 0}, "quality"),
        ({"quality": 101}, "quality"),
        ({"scale": 0.0}, "scale"),
        ({"scale": -500.0}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": math.nan}, "scale"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jpeg(**arguments)
