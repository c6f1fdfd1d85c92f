"""The samples of a run: its fixed prompts down, its checkpoints across."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.evaluation.image_grids import labelled_grid, load_strip
from flowrl.runs.folder import PROMPTS, SAMPLES, SOURCES, RunPath, read_prompts, read_verdicts


def run_grid(run: RunPath, *, max_columns: int = 8) -> Image.Image:
    """Draw the samples of a run: its fixed prompts down, evenly spaced checkpoints across, first
    and last included; in green and red frames where a checker judged. What they were made from
    comes first, where they start from images: all sources of a prompt, side by side.

    Raises RunError if the folder holds no samples or a damaged one, DataError if `max_columns` is
    below 2.
    """
    if max_columns < 2:
        raise DataError(
            f"expected max_columns >= 2, for the first and the last checkpoint, got {max_columns}"
        )
    files = sample_files(run)
    if not files:
        raise RunError(
            f"{Path(run) / SAMPLES} holds no samples: expected 000000.png, 000020.png ... as a "
            "training run writes them"
        )
    order = evenly_spaced(sorted(files), max_columns)
    # a column of images for each
    prompts, shape = read_prompts(run)
    columns, right, judged = {}, {}, read_verdicts(run)
    for iteration in order:
        images = load_strip(files[iteration], len(prompts), shape[1])
        check_shape(files[iteration], images.shape[-2:], len(prompts), shape)
        name = f"iter {iteration}" if iteration else "before"
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
    file = Path(run) / SAMPLES / SOURCES
    if not file.exists():
        return None
    prompts, shape = read_prompts(run)
    images = load_strip(file, len(prompts), shape[1])
    return images if images.ndim == 5 else images[:, None]


def evenly_spaced(iterations: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the iterations, first and last included."""
    if len(iterations) <= most:
        return [*iterations]
    step = (len(iterations) - 1) / (most - 1)
    return [iterations[round(i * step)] for i in range(most)]


def sample_files(run: RunPath) -> dict[int, Path]:
    """Return {iteration: strip} of a run folder; empty without samples. Raises RunError if there is
    no such folder."""
    if not Path(run).is_dir():
        raise RunError(f"{run} is not a run folder: no such folder")
    found = sorted((Path(run) / SAMPLES).glob("*.png"))
    return {int(file.stem): file for file in found if re.fullmatch(r"[0-9]{6,}", file.stem)}
