"""The samples of a run: its fixed prompts down and its checkpoints across as one picture, or one by
one, compressed for a page."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image

from flowrl.core.errors import RunError
from flowrl.evaluation.image_strips import read_strip
from flowrl.runs.folder import PROMPTS, SAMPLES, SOURCES, RunPath, read_prompts, read_verdicts

if TYPE_CHECKING:
    from torch import Tensor

PIXELS = 256  # of an image's longer side, at most
MOST, COLUMNS = 24, 8  # checkpoints on a page, and of a grid
BUDGET = 6_000_000  # bytes of all images of a page
# the longer side and the quality of the images of a page, from the best down
SMALLER = ((PIXELS, 90), (PIXELS, 75), (PIXELS, 55), (PIXELS, 35), (PIXELS // 2, 35), (64, 35))
Item = TypeVar("Item")


def run_grid(run: RunPath) -> Image.Image:
    """Draw the samples of a run: its fixed prompts down, evenly spaced checkpoints across, first
    and last included; in green and red frames where a checker judged. What they were made from
    comes first, where they start from images: all sources of a prompt, side by side.

    Raises RunError if the folder holds no samples or a damaged one.
    """
    from flowrl.evaluation.image_grids import labelled_grid, load_strip  # by torch

    files = sample_files(run)
    if not files:
        raise RunError(
            f"{Path(run) / SAMPLES} holds no samples: expected 000000.png, 000020.png ... as a "
            "training run writes them"
        )
    order = evenly(sorted(files), COLUMNS)
    # a column of images for each
    prompts, shape = read_prompts(run)
    columns, right, judged = {}, {}, read_verdicts(run)
    for iteration in order:
        images = load_strip(files[iteration], len(prompts), shape[1])
        check_shape(files[iteration], images.shape[-2:], len(prompts), shape)
        name = "before"
        if iteration > 0:
            name = f"iter {iteration}"
        columns[name] = images
        if len(judged.get(iteration, [])) == len(prompts):
            right[name] = judged[iteration]
    return labelled_grid(columns, prompts, right=right, starts=source_images(run))


def check_shape(file: Path, found: Sequence[int], count: int, shape: tuple[int, int]) -> None:
    """Raise RunError unless the images of a strip have the height and width of the run's."""
    if tuple(found) != shape:
        raise RunError(
            f"{file}: expected {count} images of height and width {shape} as {PROMPTS} says, got "
            f"{tuple(found)}; remove the file if it is another run's"
        )


def source_images(run: RunPath) -> Tensor | None:
    """Read the K images that each sample of a run starts from -> [P, K, 3, H, W] in [0, 1]; None
    where they start from noise alone. Raises RunError for a damaged file."""
    from flowrl.evaluation.image_grids import load_strip  # by torch

    file = Path(run) / SAMPLES / SOURCES
    if not file.exists():
        return None
    prompts, shape = read_prompts(run)
    images = load_strip(file, len(prompts), shape[1])
    if images.ndim == 4:
        return images[:, None]
    return images


def sample_files(run: RunPath) -> dict[int, Path]:
    """Return {iteration: strip} of a run folder; empty without samples. Raises RunError if there is
    no such folder."""
    if not Path(run).is_dir():
        raise RunError(f"{run} is not a run folder: no such folder")
    found = sorted((Path(run) / SAMPLES).glob("*.png"))
    return {int(file.stem): file for file in found if re.fullmatch(r"[0-9]{6,}", file.stem)}


def samples(run: RunPath, *, budget: int = BUDGET) -> dict[str, Any] | None:
    """Return the samples of a run for a page: ``{"prompts", "keys", "iterations", "images",
    "right", "sources"}``; None without samples. Images are data URLs, a list per iteration, and
    sources a list per prompt; keys are those of `sample_keys`.

    At most `MOST` evenly spaced iterations, first and last included; of a lower quality, then
    smaller, where they would take more than `budget` bytes. Raises RunError for damaged files.
    """
    files = sample_files(run)
    if not files:
        return None
    prompts, shape = read_prompts(run)
    order = evenly(sorted(files), MOST)
    strips = [tiles(files[iteration], len(prompts)) for iteration in order]
    for iteration, strip in zip(order, strips, strict=True):
        # frames of a video stand side by side
        wide, high = strip[0].size
        if wide % shape[1] == 0:
            wide = shape[1]
        check_shape(files[iteration], (high, wide), len(prompts), shape)
    starts = source_tiles(run)
    # sources share the budget
    small = _compressed([*strips, *starts], budget)
    urls = [[*map(_url, row)] for row in small]
    judged = read_verdicts(run)
    right = [_fits(judged.get(iteration, []), len(prompts)) for iteration in order]
    told = {"prompts": prompts, "keys": sample_keys(prompts, starts), "iterations": order}
    images, sources = urls[: len(order)], urls[len(order) :]
    return {**told, "images": images, "right": right, "sources": sources}


def sample_index(run: RunPath) -> dict[str, Any] | None:
    """Return the same without the images, for a page that asks for each by itself; "sources" says
    how many each prompt has."""
    files = sample_files(run)
    if not files:
        return None
    prompts, _ = read_prompts(run)
    order, judged = sorted(files), read_verdicts(run)
    right = [_fits(judged.get(iteration, []), len(prompts)) for iteration in order]
    starts = source_tiles(run)
    told = {"prompts": prompts, "keys": sample_keys(prompts, starts), "iterations": order}
    return {**told, "right": right, "sources": [*map(len, starts)]}


def sample_as_png(run: RunPath, iteration: int, place: int) -> bytes:
    """Return the sample of one prompt as PNG, as it was made. Raises RunError where there is
    none."""
    image = strip_of(run, iteration)
    if not 0 <= place < len(image):
        raise RunError(f"{run}: there is no sample {place} of iteration {iteration}")
    return _png(image[place])


def thumbnail(run: RunPath, iteration: int) -> bytes:
    """Return the first sample of an iteration as WebP, small. Raises RunError where there is
    none."""
    image = strip_of(run, iteration)[0]
    # of a film its first frame
    image = image.crop((0, 0, min(image.width, 2 * image.height), image.height))
    return _webp(image, 96, 75)


def source_as_png(run: RunPath, place: int, which: int) -> bytes:
    """Return one of the images that a prompt's samples start from as PNG. Raises RunError where
    there is none."""
    starts = source_tiles(run)
    if not 0 <= place < len(starts) or not 0 <= which < len(starts[place]):
        raise RunError(f"{run}: there is no source {which} of sample {place}")
    return _png(starts[place][which])


def source_tiles(run: RunPath) -> list[list[Image.Image]]:
    """Return what the samples of each prompt start from, a list per prompt, empty where that is
    noise alone. Raises RunError for a damaged file."""
    file = Path(run) / SAMPLES / SOURCES
    prompts, shape = read_prompts(run)
    if not file.exists():
        return [[] for _ in prompts]
    rows = read_strip(file, len(prompts))
    # several sources of a prompt stand side by side
    count, rest = divmod(rows.shape[2], shape[1])
    if rest or not count:
        count = 1
    return [_pictures(np.split(row, count, axis=1)) for row in rows]


def sample_keys(prompts: Sequence[str], starts: Sequence[Sequence[Image.Image]]) -> list[str]:
    """Return what tells each sample [P] from others, of this run and of any other: its prompt, what
    it starts from, and which it is of several that are equal in both."""
    keys: list[str] = []
    seen: Counter[str] = Counter()
    for prompt, images in zip(prompts, starts, strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for image in images:
            digest.update(image.tobytes())
        key = f"{prompt}\n{digest.hexdigest()}"
        keys.append(f"{key}\n{seen[key]}")
        seen[key] += 1
    return keys


def strip_of(run: RunPath, iteration: int) -> list[Image.Image]:
    """Return the samples of one iteration. Raises RunError where there are none."""
    file = sample_files(run).get(iteration)
    if file is None:
        raise RunError(f"{run}: there are no samples of iteration {iteration}")
    return tiles(file, len(read_prompts(run)[0]))


def tiles(file: Path, count: int) -> list[Image.Image]:
    """Cut a strip into its `count` images. Raises RunError for a damaged one."""
    return _pictures(read_strip(file, count))


def _pictures(levels: Iterable[np.ndarray]) -> list[Image.Image]:
    """Return bytes [H, W, 3] as pictures."""
    return [Image.fromarray(np.ascontiguousarray(one)) for one in levels]


def evenly(values: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` of the values, evenly spaced, the first and the last included."""
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int)
    return [values[place] for place in places.tolist()]


def _compressed(strips: list[list[Image.Image]], budget: int) -> list[list[bytes]]:
    """Write images as WebP, together within the budget if a quality or size can make them so."""
    found: list[list[bytes]] = []
    for side, quality in SMALLER:
        compress = partial(_webp, side=side, quality=quality)
        found = [[*map(compress, strip)] for strip in strips]
        if sum(map(len, chain.from_iterable(found))) <= budget:
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


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _url(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(data).decode("ascii")


def _fits(verdicts: Sequence[bool | None], count: int) -> list[bool | None]:
    if len(verdicts) != count:
        return [None] * count
    return list(verdicts)
