"""The package's tiny pipelines by the name of their class, by the names that tests import; and how
those that make a megapixel alone make small images."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import diffusers
from piecekit import with_pieces

from flowrl.models.tiny import classes, save, tiny_pipeline

__all__ = ["SIDE", "TINY", "save", "small", "tiny_pipeline"]
TINY = classes()
SIDE = 64  # pixels
MEGAPIXEL = 1024 * 1024
SCALING = (
    "qwenimage.pipeline_qwenimage_edit",
    "qwenimage.pipeline_qwenimage_edit_plus",
    "longcat_image.pipeline_longcat_image_edit",
)
# what the class sets to a megapixel when it is made, and small
CHOOSING: dict[str, dict[str, Any]] = {
    "Kandinsky5T2IPipeline": {"resolutions": [(SIDE, SIDE)]},
    "Kandinsky5I2IPipeline": {"resolutions": [(SIDE, SIDE)]},
    "HiDreamImagePipeline": {"default_sample_size": SIDE // 8},
}


@contextmanager
def small() -> Iterator[None]:
    """Let pipelines that scale every source, or every image, to a megapixel take 64 x 64 pixels:
    the area is a constant in their modules; and those that ask for a package that is not here have
    a stand-in."""
    with ExitStack() as stack:
        stack.enter_context(with_pieces())
        for name in SCALING:
            module = importlib.import_module(f"diffusers.pipelines.{name}")
            scaled = _scaled(module.calculate_dimensions)
            stack.enter_context(patch.object(module, "calculate_dimensions", scaled))
        for name, chosen in CHOOSING.items():
            kind: Any = getattr(diffusers, name)
            stack.enter_context(patch.object(kind, "__init__", _choosing(kind.__init__, chosen)))
        yield


def _scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(area: int, ratio: float) -> Any:
        return real(SIDE**2 if area == MEGAPIXEL else area, ratio)

    return scaled


def _choosing(real: Callable[..., None], chosen: dict[str, Any]) -> Callable[..., None]:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        vars(self).update(chosen)

    return init
