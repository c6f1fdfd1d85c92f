"""The image that an edit started from, as a judge of edits needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PIL import Image

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch

from .._common.scorer import to_pil


def needs_source(record: Mapping[str, Any], where: str, who: str) -> None:
    """Refuse a record that names no source. Raises DataError."""
    if not record.get("source"):
        raise DataError(
            f"{where}: {who}: expected a record with a source, the image that the edit starts from"
        )


def first_source(batch: RewardBatch, place: int, who: str) -> Image.Image:
    """Return the first image that image `place` started from. Raises DataError if there is none."""
    sources = batch.source[place] if batch.source else ()
    if not sources:
        raise DataError(f"{who}: image {place} comes without its source; edits have one")
    return to_pil(sources[0][None])[0]
