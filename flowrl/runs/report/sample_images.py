"""The samples of a run one by one, compressed for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from flowrl.core.errors import RunError
from flowrl.evaluation.image_grids import load_strip
from flowrl.runs.folder import RunPath, read_prompts, read_verdicts
from flowrl.runs.report.run_grid import sample_files

PIXELS = 256  # of an image's longer side, at most
MOST = 24  # checkpoints on a page
BUDGET = 6_000_000  # bytes of all images of a page
QUALITIES = (90, 75, 55, 35)


def samples(run: RunPath, *, budget: int = BUDGET) -> dict[str, Any] | None:
    """Return the samples of a run for a page: ``{"prompts", "iterations", "images", "right"}``,
    images as data URLs, a list per iteration; None without samples.

    At most `MOST` evenly spaced iterations, first and last included; of a lower quality, then
    smaller, where they would take more than `budget` bytes. Raises RunError for damaged files.
    """
    files = sample_files(run)
    if not files:
        return None
    prompts, _ = read_prompts(run)
    order = evenly(sorted(files), MOST)
    strips = [tiles(files[iteration], len(prompts)) for iteration in order]
    judged = read_verdicts(run)
    right = [_fits(judged.get(iteration, []), len(prompts)) for iteration in order]
    images = [[*map(_url, strip)] for strip in _compressed(strips, budget)]
    return {"prompts": prompts, "iterations": order, "images": images, "right": right}


def sample_index(run: RunPath) -> dict[str, Any] | None:
    """Return the same without the images, for a page that asks for each by itself."""
    files = sample_files(run)
    if not files:
        return None
    prompts, _ = read_prompts(run)
    order, judged = sorted(files), read_verdicts(run)
    right = [_fits(judged.get(iteration, []), len(prompts)) for iteration in order]
    return {"prompts": prompts, "iterations": order, "right": right}


def sample_as_png(run: RunPath, iteration: int, place: int) -> bytes:
    """Return the sample of one prompt as PNG, as it was made. Raises RunError where there is
    none."""
    image = strip_of(run, iteration)
    if not 0 <= place < len(image):
        raise RunError(f"{run}: there is no sample {place} of iteration {iteration}")
    buffer = io.BytesIO()
    image[place].save(buffer, format="PNG")
    return buffer.getvalue()


def strip_of(run: RunPath, iteration: int) -> list[Image.Image]:
    """Return the samples of one iteration. Raises RunError where there are none."""
    file = sample_files(run).get(iteration)
    if file is None:
        raise RunError(f"{run}: there are no samples of iteration {iteration}")
    return tiles(file, len(read_prompts(run)[0]))


def tiles(file: Path, count: int) -> list[Image.Image]:
    """Cut a strip into its `count` images. Raises RunError for a damaged one."""
    levels = (load_strip(file, count) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(np.ascontiguousarray(one)) for one in levels]


def evenly(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the values, evenly spaced, the first and the last included."""
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int)
    return [values[place] for place in places.tolist()]


def _compressed(strips: list[list[Image.Image]], budget: int) -> list[list[bytes]]:
    """Write images as WebP, together within the budget if a quality or size can make them so."""
    found: list[list[bytes]] = []
    for side, quality in [*((PIXELS, q) for q in QUALITIES), (PIXELS // 2, 35), (64, 35)]:
        compress = partial(_webp, side=side, quality=quality)
        found = [[*map(compress, strip)] for strip in strips]
        if sum(len(data) for strip in found for data in strip) <= budget:
            break
    return found


def _webp(image: Image.Image, side: int, quality: int) -> bytes:
    long = max(image.size)
    if long > side:
        width, height = (max(1, round(size * side / long)) for size in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="WEBP", quality=quality, method=4)
    return buffer.getvalue()


def _url(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(data).decode("ascii")


def _fits(verdicts: Sequence[bool | None], count: int) -> list[bool | None]:
    return list(verdicts) if len(verdicts) == count else [None] * count
