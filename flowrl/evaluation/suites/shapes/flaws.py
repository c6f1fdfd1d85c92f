"""What templates and mean colours do not see: corners on a circle, paint on a shape, traces on the
background.

Each limit lies between what 600 true scenes show, drawn and through the VAE of `assets/shapes-sd3`,
and what the probes in `tests/evaluation/test_checker_flaws.py` do: each may be a tenth higher
before the first probe passes.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

# largest angular harmonic of an outline, of the 3rd to the 8th: circles have up to 0.074, regular
# hexagons 0.22 to 0.27, pentagons 0.33 to 0.34, at radii of 9 to 13 pixels
MAX_HARMONIC = 0.14
HARMONICS = range(3, 9)
# of the pixels inside a shape: root mean square RGB distance from their mean (true: up to 0.071),
MAX_SPREAD = 0.11
# and how many of them are further away than STRAY (true: up to 2)
STRAY, MAX_STRAYS = 0.2, 4
# of the background, 3 pixels off all shapes: root mean square of the largest channel's difference
# (true: up to 0.0134) and the largest mean of 5 x 5 pixels in a channel (true: up to 0.0433)
MAX_ROUGHNESS = 0.03
MAX_TRACE = 0.07
# pixels off the background in specks too small to be objects (true: none)
MAX_SPECKS = 3


def mixed(pixels: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Say which of `count` blobs are of more than one colour inside: images [N, 3, H, W], labels
    [N, H, W] (1..count) -> [count] bool."""
    inside = labels * (ndimage.minimum_filter(labels, (1, 3, 3)) == labels)
    image, row, column = np.nonzero(inside)
    ids, values = inside[image, row, column], pixels[image, :, row, column]
    size = np.maximum(np.bincount(ids, minlength=count + 1), 1)
    mean = [np.bincount(ids, values[:, c], count + 1) / size for c in range(3)]
    away = np.linalg.norm(values - np.stack(mean, -1)[ids], axis=-1)
    spread = np.sqrt(np.bincount(ids, away**2, count + 1) / size)
    strays = np.bincount(ids, away > STRAY, count + 1)
    return ((spread > MAX_SPREAD) | (strays > MAX_STRAYS))[1:]


def cornered(mask: np.ndarray) -> np.ndarray:
    """Say which soft masks [M, W, W] have corners where a circle has none -> [M] bool.

    The n-th harmonic is ``(n + 2) / 2 |sum mask z^n| / area`` with z the place from the centroid in
    units of the circle's radius: 0 for a disk, and ``(n + 2) eps / 2`` for an outline ``1 + eps
    cos(n angle)``.
    """
    grid = np.arange(mask.shape[-1]) + 0.5
    area = mask.sum((1, 2))
    x = (mask.sum(1) @ grid) / area
    y = (mask.sum(2) @ grid) / area
    radius = np.sqrt(area / np.pi)[:, None, None]
    z = (grid[None, None, :] - x[:, None, None]) + 1j * (grid[None, :, None] - y[:, None, None])
    z = z / radius
    found = [(n + 2) / 2 * np.abs((mask * z**n).sum((1, 2))) / area for n in HARMONICS]
    return np.max(found, axis=0) > MAX_HARMONIC


def traced(pixels: np.ndarray, background: np.ndarray, strong: np.ndarray) -> np.ndarray:
    """Say which images [N, 3, H, W] have traces on the background: faint shapes, stripes, texture
    -> [N] bool.

    background [N, 3]; strong [N, H, W] bool: pixels of shapes.
    """
    free = ~(ndimage.maximum_filter(strong.astype(np.uint8), (1, 7, 7)) > 0)
    away = (pixels - background[:, :, None, None]) * free[:, None]
    many = np.maximum(free.sum((1, 2)), 1)
    rough = np.sqrt((np.abs(away).max(1) ** 2).sum((1, 2)) / many)
    # means over what is free of 5 x 5 pixels, where that is most of them
    share = ndimage.uniform_filter(free.astype(np.float32), (0, 5, 5))[:, None]
    means = ndimage.uniform_filter(away, (0, 0, 5, 5)) / np.maximum(share, 0.5)
    trace = (np.abs(means) * (share > 0.5)).max((1, 2, 3))
    return (rough > MAX_ROUGHNESS) | (trace > MAX_TRACE)
