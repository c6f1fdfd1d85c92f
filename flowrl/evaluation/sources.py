"""The images that prompts start from: a record names them under ``source``, one path or a list of
them, as seen from its prompt list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from flowrl.core.abilities import conditioning
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.pixels import from_bytes
from flowrl.core.prompts import PromptSet
from flowrl.core.types import Cond, FlowModel, Source
from flowrl.evaluation.image_files import ENDINGS, ImageFile, find_images, read_fitted, read_image

SOURCE = "source"
ASPECT = 0.02  # by how much of itself a source's aspect ratio may differ from that of the run
DECODED = 2**28  # pixels of a list that are decoded to see whether they are whole; then headers


def prompt_keys(texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what tells each of the prompts [L] from others: its text, and of an edit also the
    files that it starts from, as its record names them."""
    keys = []
    for text, record in zip(texts, records, strict=True):
        names = named_images(record)
        if names:
            text += f" (source: {', '.join(names)})"
        keys.append(text)
    return keys


def named_images(record: Mapping[str, Any]) -> list[str]:
    """Return the files that a record names under ``source``, as it names them; [] where it names no
    image, or anything but texts."""
    names = _names(record.get(SOURCE))
    return [*map(str, names)] if isinstance(names, list) else []


def source_paths(prompts: PromptSet, row: int) -> list[Path]:
    """Return the files that a record names under ``source``; [] where it names no image.

    A text without the ending of an image is something else of the user's, such as where a prompt
    comes from. Raises DataError, with file and line, for a list that holds anything but texts.
    """
    value = prompts.records[row].get(SOURCE)
    names = _names(value)
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise DataError(
            f"{place_of(prompts, row)}: expected the file of an image, or a list of them, as "
            f"{SOURCE!r}, got {value!r}"
        )
    return [Path(prompts.path).parent / name for name in names]


def _names(value: Any) -> Any:
    """Return the images that a record's value of ``source`` names: a list, if it is well made."""
    if value is None or (isinstance(value, str) and not value.lower().endswith(ENDINGS)):
        return []
    return [value] if isinstance(value, str) else value


def sources_of(
    prompts: PromptSet, rows: Sequence[int], size: tuple[int, int] | None
) -> list[Source]:
    """Read the sources of prompts `rows` [L] -> [L] sources; [] where none of them has one.

    Each is scaled to `size` (height, width), or is as large as its file with None. A prompt that
    comes several times has one copy. Raises DataError.
    """
    wanted = list(dict.fromkeys(rows))
    # most lists start from noise alone
    if not any(SOURCE in prompts.records[row] for row in wanted):
        return []
    read: dict[int, Source] = {}
    for row in wanted:
        paths = source_paths(prompts, row)
        read[row] = tuple(from_bytes(_levels(path, size)) for path in paths)
    return [read[row] for row in rows] if any(read.values()) else []


def encode_rows(
    model: FlowModel,
    prompts: PromptSet,
    rows: Sequence[int],
    size: tuple[int, int],
    texts: list[str] | None = None,
) -> Cond:
    """Encode prompts `rows` [G], with their sources where the model starts from images -> {name:
    [G, ...]}. `size`: height and width of the images that are made; texts [G]: in place of those of
    the prompts."""
    if texts is None:
        texts = prompts.texts_of(rows)
    starts: list[Source] = []
    if hasattr(model, "encode_with_sources"):
        starts = sources_of(prompts, rows, size)
    return conditioning(model, texts, starts)


def check_sources(prompts: PromptSet, size: tuple[int, int] | None = None) -> None:
    """Look at every source of a list. Raises DataError, with file and line, for one that is
    missing, broken, not RGB, or of another aspect ratio than `size` (height, width)."""
    check_images(prompts, SOURCE, source_paths, lambda file: _check_file(file, size))


def check_images(
    prompts: PromptSet,
    key: str,
    paths: Callable[[PromptSet, int], list[Path]],
    also: Callable[[ImageFile], None] | None = None,
) -> None:
    """Look at every image that the records of a list name under `key`: those of a row are
    `paths(prompts, row)`. Raises DataError, with file and line, for one that is missing or broken,
    or as `also` does."""
    decoded, seen = 0, set[Path]()
    for row in range(len(prompts)):
        # many prompts may name one image: it is looked at once
        for path in paths(prompts, row):
            if path in seen:
                continue
            seen.add(path)
            try:
                if not path.is_file():
                    raise DataError(f"{path}: no such file; it is looked for beside the list")
                file = find_images([path])[0]
                if also is not None:
                    also(file)
                # headers are cheap; pixels only up to a limit, or a long list would take minutes
                if decoded < DECODED:
                    decoded += file.size[0] * file.size[1]
                    read_image(file)
            except DataError as error:
                raise DataError(f"{place_of(prompts, row)}, {key}: {error}") from error


def check_starts(model: FlowModel, prompts: PromptSet) -> None:
    """Raise an error unless a list has sources for a model that starts from images (DataError, with
    file and line), as many for each prompt, and none for another one (ConfigError)."""
    # None: a model that starts from noise
    most: int | None = getattr(model, "most_sources", None)
    fewest: int = getattr(model, "fewest_sources", 1)
    # prompts share network calls, so all must have as many sources
    first = len(source_paths(prompts, 0))
    for row in range(len(prompts)):
        count = len(source_paths(prompts, row))
        where = place_of(prompts, row)
        if most is None and count:
            raise ConfigError(
                f"model: {type(model).__name__} starts from noise alone, but {where} names a "
                f"{SOURCE!r}; take a model that edits images, or another list"
            )
        if most is not None and not fewest <= count <= most:
            expected = "one image" if most == 1 else f"{fewest} to {most} images"
            raise DataError(
                f"{where}: expected {expected} as {SOURCE!r}, which {type(model).__name__} starts "
                f"from, got {count}"
            )
        if most is not None and count != first:
            raise DataError(
                f"{where}: expected as many images as {SOURCE!r} as the first prompt has, {first}, "
                f"got {count}: prompts share calls of the network; take a list for each number"
            )


def _check_file(file: ImageFile, size: tuple[int, int] | None) -> None:
    with Image.open(file.path) as image:
        mode = image.mode
    if mode != "RGB" or file.moves:
        got = "several frames" if file.moves else f"mode {mode}"
        raise DataError(
            f"{file.path}: expected an RGB image, got {got}; save it as RGB, transparency laid on "
            "the background that the edit should see"
        )
    if size is not None:
        rows, columns = file.size
        if abs(rows * size[1] / (columns * size[0]) - 1) > ASPECT:
            raise DataError(
                f"{file.path}: expected the aspect ratio of image.height x image.width, "
                f"{size[0]} x {size[1]}, got {rows} x {columns}; crop it, or change image"
            )


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: tuple[int, int] | None) -> Tensor:
    if size is None:
        return read_image(find_images([path])[0])[0]
    return read_fitted(path, *size)


def _levels(path: Path, size: tuple[int, int] | None) -> Tensor:
    """Read a source -> uint8 [3, height, width]; those of the last prompts are remembered."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        changed = 0  # reading it says what is wrong
    return _read(path, changed, size)


def place_of(prompts: PromptSet, row: int) -> str:
    """Say where a prompt stands: its file and line, where it was read from one."""
    return prompts.places[row] if prompts.places else f"prompt {row + 1}"
