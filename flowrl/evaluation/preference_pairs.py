"""Pairs of images of which one is preferred, as records of a prompt list name them.

A record has ``image_0`` and ``image_1``, paths as seen from the list, and ``label_0``: 1 where the
first is preferred, 0 where the second is, 0.5 for a tie, which trains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.prompts import PromptSet, Record
from flowrl.evaluation.image_files import find_images, read_fitted

IMAGES = ("image_0", "image_1")
LABEL = "label_0"


class PreferencePair(NamedTuple):
    """Two images of a prompt, and how much the first is preferred."""

    images: tuple[Path, Path]
    label: float  # 1, 0 or 0.5

    @property
    def preferred(self) -> Path | None:
        """Return the better image; None for a tie."""
        return None if self.label == 0.5 else self.images[int(self.label == 0)]


def read_pair(record: Record, where: str, folder: Path) -> PreferencePair:
    """Read a record; its paths start at `folder`. Raises DataError for what is missing."""
    names = [record.get(key) for key in IMAGES]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(
            f"{where}: expected the files of two images as {IMAGES[0]!r} and {IMAGES[1]!r}, got "
            f"{names[0]!r} and {names[1]!r}; `flowrl pairs` writes such a list"
        )
    first, second = (folder / str(name) for name in names)
    return PreferencePair((first, second), label_of(record, where))


def label_of(record: Record, where: str) -> float:
    """Return how much the first image of a record is preferred. Raises DataError unless it is 1, 0
    or 0.5."""
    value = record.get(LABEL)
    try:
        label = float(value)  # type: ignore[arg-type]  # a CSV file has texts
    except (TypeError, ValueError):
        label = -1.0
    if label not in (0.0, 0.5, 1.0) or isinstance(value, bool):
        raise DataError(
            f"{where}: expected {LABEL!r} 1 (the first image is preferred), 0 (the second) or 0.5 "
            f"(a tie), got {value!r}"
        )
    return label


def check_pairs(prompts: PromptSet) -> None:
    """Look at every pair of a list. Raises DataError, with file and line, for an image that is
    missing or no image, for two equal images, for a pair whose labels contradict each other, and
    for a list of ties."""
    folder = Path(prompts.path).parent
    seen: dict[tuple[str, frozenset[Path]], tuple[Path, str]] = {}
    for record, where in zip(prompts.records, prompts.places, strict=True):
        pair = read_pair(record, where, folder)
        check_pair_images(pair, where)
        if pair.preferred is None:
            continue
        # the same two images in either order are one pair: all its labels must agree
        key = (record["prompt"], frozenset(path.resolve() for path in pair.images))
        better, earlier = seen.setdefault(key, (pair.preferred.resolve(), where))
        if better != pair.preferred.resolve():
            raise DataError(
                f"{where}: prefers {pair.preferred.name}, but {earlier} prefers the other image of "
                f"the same pair and prompt; keep one of the two, or make it a tie ({LABEL} 0.5)"
            )
    if not seen:
        raise DataError(f"{prompts.path}: every pair is a tie ({LABEL} 0.5), so none can be learnt")


def check_pair_images(pair: PreferencePair, where: str) -> None:
    """Raise DataError unless both images of a pair are there, can be read, and differ."""
    for key, path in zip(IMAGES, pair.images, strict=True):
        try:
            find_images([path])
        except DataError as error:
            raise DataError(f"{where}, {key}: {error}") from error
    first, second = pair.images
    same_file = first.resolve() == second.resolve()
    if same_file or (
        first.stat().st_size == second.stat().st_size and first.read_bytes() == second.read_bytes()
    ):
        raise DataError(
            f"{where}: both images are the same ({first.name}, {second.name}), so neither can be "
            "preferred; take the pair out"
        )


def load_pairs(pairs: Sequence[PreferencePair], height: int, width: int) -> Tensor:
    """Read the images of pairs, pair after pair -> uint8 [2 N, 3, height, width].

    Each is scaled until it covers the size, and the middle of it is taken: Diffusion-DPO's
    (2311.12908) code without its random crops and flips. Raises DataError naming the file.
    """
    paths = [path for pair in pairs for path in pair.images]
    return torch.stack([read_fitted(path, height, width) for path in paths])


def labels_of(records: Sequence[Record], group: Tensor) -> Tensor:
    """Return what the labels say of each image [L], those of a prompt in the order of its record:
    the label of the first, one minus it of the second -> float32 [L]."""
    met: set[int] = set()
    values = []
    for record, prompt in zip(records, group.tolist(), strict=True):
        label = label_of(record, "record")
        values.append(1 - label if prompt in met else label)
        met.add(prompt)
    return torch.tensor(values)
