"""Reference images: which belong to a prompt, reading them, drawing from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from flowrl.core.errors import DataError
from flowrl.core.seeds import generator

from .scorer import local

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


def open_image(file: Path, who: str) -> Image.Image:
    """Read an image as RGB, turned as its EXIF note says. Raises DataError."""
    try:
        with Image.open(file) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{who}: reference image {file} cannot be read: {error}") from error


class References:
    """Which reference images belong to a prompt: all of `folder`, or those that the record's
    `column` names.

    Paths in the column are relative to `root`. Raises DataError for a folder without images.
    """

    def __init__(self, folder: str, *, column: str, root: str, who: str) -> None:
        self.column, self.root, self.who = column, local(root), who
        self.pool = _listed(local(folder), who) if folder else ()

    def check(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record without references, or with one that is missing or no image. Raises
        DataError."""
        for file in () if self.pool else self.of(record, where):
            try:
                with Image.open(file):  # reads the header only
                    pass
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise DataError(
                    f"{where}: {self.who}: expected a reference image at {file} (paths are "
                    f"relative to root={str(self.root)!r}), got: {error}"
                ) from error

    def of(self, record: dict[str, Any], where: str = "") -> tuple[Path, ...]:
        """Return the files that belong to a record, at least one. Raises DataError."""
        # one pool for all
        if self.pool:
            return self.pool
        # a path or a list of them
        value = record.get(self.column)
        names = [value] if isinstance(value, str) else value
        good = isinstance(names, list) and all(isinstance(n, str) and n.strip() for n in names)
        if not good or not names:
            place = where or f"prompt {record.get('prompt')!r}"
            raise DataError(
                f"{place}: {self.who}: expected one path or a list of paths as {self.column!r}, "
                f"got {value!r}; name the references of each prompt there, or give one folder for "
                "all as `references`"
            )
        return tuple(self.root / name for name in names)

    def draw(self, records: Sequence[dict[str, Any]], *key: int | str) -> list[Path]:
        """Draw one reference for each record; the draws follow from `key` and the place in the list
        alone."""
        picks = torch.rand(len(records), generator=generator(*key), dtype=torch.float64).tolist()
        files = [self.of(record) for record in records]
        return [mine[int(pick * len(mine))] for mine, pick in zip(files, picks, strict=True)]


def _listed(folder: Path, who: str) -> tuple[Path, ...]:
    if not folder.is_dir():
        raise DataError(
            f"{who}: references: expected a folder of images, got {folder}, which is none"
        )
    found = tuple(sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES))
    if not found:
        raise DataError(f"{who}: references: {folder} holds no image ({', '.join(sorted(IMAGES))})")
    return found
