"""What the networks of the CLIP family are shown: the pixels of the public code."""

from __future__ import annotations

from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import MEAN, STD, pil, public_pixels, random_images
from PIL import Image
from torchvision import transforms
from transformers import CLIPImageProcessor
from weightkit import Weights

from rewards._common.pixels import letterbox, normalise, shortest, squash
from rewards.clip import clip

SIZES = [(512, 512), (224, 224), (64, 64), (64, 100), (300, 227), (227, 300), (224, 231)]


@pytest.mark.parametrize("size", [*SIZES, (1000, 333)])
def test_pixels_are_open_clips_to_the_last_bit(size: tuple[int, int]) -> None:
    image = pil(random_images(1, *size)[0])
    for mode, ours in {"shortest": shortest, "squash": squash}.items():
        expected = open_clip.image_transform(224, is_train=False, resize_mode=mode)(image)
        assert torch.equal(normalise(ours(image, 224)), expected)


@pytest.mark.parametrize("size", [(512, 512), (64, 100), (300, 227), (225, 233), (1000, 333)])
def test_transformers_pixels_are_pils(weights: Weights, size: tuple[int, int]) -> None:
    """Expected: Pillow and numpy by hand; transformers rounds the crop's corner down."""
    image = pil(random_images(1, *size)[0])
    short = min(image.size)
    width, height = (224 if side == short else int(224 * side / short) for side in image.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    levels = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    towers: Any = clip(path=str(weights.clip.folder)).towers
    found = towers.images([image], return_tensors="pt")["pixel_values"][0]
    expected = (levels - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=2e-6)
    # torchvision, the default, is 1 to 3 of 255 levels apart (measured)
    modern = CLIPImageProcessor()([image], return_tensors="pt")["pixel_values"][0]
    assert 0.9 < (found - modern).abs().max() * 255 * max(STD) < 4.5


def test_an_odd_margin_is_cut_one_pixel_apart(weights: Weights) -> None:
    """torchvision cuts a margin of 3 at round(1.5) = 2, transformers at 3 // 2 = 1."""
    pixels = random_images(1, 224, 227)[0]
    image = pil(pixels)
    assert torch.equal(shortest(image, 224), pixels[:, :, 2:226])
    assert torch.equal(transforms.CenterCrop(224)(pixels), pixels[:, :, 2:226])
    towers: Any = clip(path=str(weights.clip.folder)).towers
    found = towers.images([image], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(found, normalise(pixels[:, :, 1:225]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("size", [*SIZES, (100, 321), (1000, 7)])
def test_letterboxed_pixels_are_torchvisions(size: tuple[int, int]) -> None:
    image = random_images(1, *size)[0]
    for antialias in (True, False):
        found = normalise(letterbox(pil(image), 224, antialias=antialias))
        expected = public_pixels(image, antialias)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(300, 227), (227, 300), (333, 1000)])
def test_open_clips_longest_mode_agrees_but_for_pils_rounding(size: tuple[int, int]) -> None:
    """open_clip resizes 8-bit images, HPSv2 floats: the inside differs by a level or two."""
    image = pil(random_images(1, *size)[0])
    expected = open_clip.image_transform(224, is_train=False, resize_mode="longest")(image)
    found = normalise(letterbox(image, 224))
    black = (expected == expected[:, :1, :1]).all(0)
    frame = black.all(0)[None] | black.all(1)[:, None]  # whole columns and rows
    assert torch.equal(found[:, frame], expected[:, frame]) and frame.float().mean() > 0.2
    inside = (found - expected).abs() * torch.tensor(STD)[:, None, None] * 255
    assert 0.3 < inside.max() < 6 and inside.mean() < 0.6


def test_a_padded_pixel_is_black_before_the_normalisation() -> None:
    """Fixture: (-1.79226, -1.75210, -1.48022), the reference, section 4.4; = -mean / std."""
    found = normalise(letterbox(pil(random_images(1, 100, 300)[0]), 224))
    expected = torch.tensor([-1.79226, -1.75210, -1.48022])
    for row, column in ((0, 0), (73, 223), (223, 100), (149, 5)):
        torch.testing.assert_close(found[:, row, column], expected, atol=6e-6, rtol=0)
    for row in (74, 148):  # 300 x 100 -> 224 x 75: rows 74 to 148 are image
        assert not torch.allclose(found[:, row, 100], expected, atol=1e-2)


def test_a_long_side_of_224_is_padded_too() -> None:
    """HPSv2's code would hand on a 224 x 100 image, which the network cannot take."""
    image = random_images(1, 100, 224)[0]
    found = letterbox(pil(image), 224)
    assert found.shape == (3, 224, 224)
    torch.testing.assert_close(found[:, 62:162], image, atol=1e-7, rtol=0)
    assert found[:, :62].abs().max() == 0 and found[:, 162:].abs().max() == 0
