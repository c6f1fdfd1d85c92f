"""Write drawn pages in the format that their name asks for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.core.errors import ConfigError
from flowrl.core.files import replacing
from flowrl.evaluation.image_grids import save_png


def page_format(path: str | os.PathLike[str]) -> str:
    """Return PIL's name of the format that a file's name asks for, PNG without an ending. Raises
    ConfigError if PIL writes none of that ending."""
    ending = Path(path).suffix.lower()
    found = Image.registered_extensions().get(ending) if ending else "PNG"
    if found is None or found not in Image.SAVE:
        raise ConfigError(f"{path}: no image can be written as {ending}; take .png, .jpg or .webp")
    return found


def save_page(image: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write an image as `save_png` does, in the format of the file's name. Raises as `page_format`
    and `save_png` do."""
    kind = page_format(path)
    if kind == "PNG":
        save_png(image, path)
        return
    best: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95}, "WEBP": {"lossless": True}}
    with replacing(path) as draft:
        image.save(draft, format=kind, **best.get(kind, {}))
