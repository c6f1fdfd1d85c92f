"""Read images that a user hands over, PNG, JPEG and WebP files of any size, and give each its
prompt record."""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.pixels import png_bytes, png_needs
from flowrl.core.prompts import PromptSet, Record, load_prompts

FORMATS = ("PNG", "JPEG", "WEBP")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
# 67 million: a file of a few kilobytes can claim any size, and would fill the memory
MAX_PIXELS = 2**26
# keys of a prompt record that may name its image; the first one wins
KEYS = ("file", "image", "file_name")
RECORD = "metadata.jsonl"  # of a prompt, in GenEval's folders
_ORIENTATION = 0x0112  # EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageFile(NamedTuple):
    """An image file whose header was read."""

    path: Path
    name: str  # how it is shown: its path inside the one folder that was given, else its path
    size: tuple[int, int]  # height, width in pixels, the right way up
    turn: int  # EXIF orientation, 1 = none
    moves: bool  # it has several frames


def find_images(paths: Sequence[str | os.PathLike[str]]) -> list[ImageFile]:
    """Open the headers of files, and of all images in and below folders, each folder sorted by
    path, without GenEval's sheets of a prompt's samples.

    Raises DataError naming the file if one is missing, no PNG, JPEG or WebP, larger than
    `MAX_PIXELS`, or given twice.
    """
    found: dict[Path, ImageFile] = {}
    for file, name in _files([Path(path) for path in paths]):
        whole = file.resolve()
        if whole in found:
            raise DataError(
                f"{file}: given twice (also as {found[whole].path}); name each image once"
            )
        found[whole] = _header(file, name)
    return list(found.values())


def _files(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        # a file as it is
        if not path.is_dir():
            yield path, str(path)
            continue
        # a folder sorted, without what is hidden or shows other images again
        names = []
        for file in path.rglob("*"):
            if file.suffix.lower() not in ENDINGS:
                continue
            name = file.relative_to(path)
            if file.is_file() and not _hidden(name) and not _is_sheet(file):
                names.append(name)
        if not names:
            raise DataError(
                f"{path}: expected a folder with images ({', '.join(ENDINGS)}), found none in it"
            )
        for name in sorted(names, key=Path.as_posix):
            if len(paths) == 1:
                yield path / name, name.as_posix()
            else:
                yield path / name, str(path / name)


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _is_sheet(file: Path) -> bool:
    """Say whether a file is the sheet of a prompt's samples that GenEval's own code puts beside
    them: 00000/grid.png."""
    beside = (file.parent / "samples", file.parent / RECORD)
    return file.name == "grid.png" and beside[0].is_dir() and beside[1].is_file()


def _header(path: Path, name: str) -> ImageFile:
    with _open(path) as image:
        turn, size = _orientation(image, path), (image.height, image.width)
        if turn >= 5:
            size = (image.width, image.height)
        # a phone's JPEG can carry a second, smaller image (MPO); that is no animation
        moves = image.format != "MPO" and getattr(image, "n_frames", 1) > 1
        return ImageFile(path, name, size, turn, moves)


def _open(path: Path) -> Image.Image:
    # Pillow's warning is left out: the limit below is the stricter one
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path}: more than {MAX_PIXELS:,} pixels; make it smaller ({error})"
        ) from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path}: expected a PNG, JPEG or WebP image, got something else or a broken file"
        ) from error
    except Exception as error:  # missing, no permission, a damaged header: Pillow raises all sorts
        raise DataError(f"{path}: cannot be read as an image: {_words(error)}") from error
    # not too large
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise DataError(
            f"{path}: expected at most {MAX_PIXELS:,} pixels, got {image.width} x {image.height}"
        )
    return image


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _orientation(image: Image.Image, path: Path) -> int:
    # asked for EXIF data, Pillow decodes a whole PNG: they may stand at its end; few have any
    if image.format == "PNG" and "exif" not in image.info and b"eXIf" not in path.read_bytes():
        return 1
    try:
        turn = image.getexif().get(_ORIENTATION, 1)
    except Exception as error:
        raise DataError(f"{path}: a damaged image: {_words(error)}") from error
    return turn if turn in _TURNS else 1


def read_image(file: ImageFile) -> tuple[Tensor, list[str]]:
    """Decode -> pixels [3, H, W] uint8 and what was done to them, for a note. Raises DataError
    naming the file.

    Turned as EXIF says; grey, palette, CMYK and 16-bit images become RGB of 8 bits; transparent
    ones are laid on white; of several frames the first is taken. Colour profiles are not applied.
    """
    notes = ["only the first frame"] if file.moves else []
    with _open(file.path) as image:
        try:
            if image.format == "PNG":
                _check_rows(file.path.read_bytes())
            rgb, see_through = _rgb(image)
        except Exception as error:  # cut off, broken checksums, memory
            raise DataError(f"{file.path}: a damaged file: {_words(error)}") from error
    if see_through:
        notes.append("transparency laid on white")
    if file.turn in _TURNS:
        rgb = rgb.transpose(_TURNS[file.turn])
        notes.append("turned as EXIF says")
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous(), notes


def read_fitted(path: Path, height: int, width: int) -> Tensor:
    """Read one image, scaled until it covers the size and cut to its middle -> uint8 [3, height,
    width]. Raises DataError naming the file."""
    levels, _ = read_image(find_images([path])[0])
    rows, columns = levels.shape[1:]
    scale = max(height / rows, width / columns)
    size = (max(height, round(rows * scale)), max(width, round(columns * scale)))
    if size != (rows, columns):
        image = interpolate(levels[None].float(), size, mode="bilinear", antialias=True)[0]
        levels = image.round().clamp(0, 255).to(torch.uint8)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return levels[:, top : top + height, left : left + width].contiguous()


def _check_rows(data: bytes) -> None:
    """Raise ValueError if rows of a PNG are missing, which Pillow would show black. What cannot be
    unpacked Pillow judges itself."""
    need = png_needs(data)
    try:
        got = png_bytes(data, need)
    except zlib.error:
        return
    if got < need:
        raise ValueError(f"expected {need} bytes of pixels, got {got}")


def _rgb(image: Image.Image) -> tuple[Image.Image, bool]:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would cut off at 255
        levels = np.asarray(image).astype(np.float64) / 257
        return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8)).convert("RGB"), False
    if not image.has_transparency_data:
        return image.convert("RGB"), False
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    low, _ = rgba.getchannel("A").getextrema()
    return Image.alpha_composite(white, rgba).convert("RGB"), bool(low != 255)


class ImagePrompts(NamedTuple):
    """What goes with images, one record each."""

    prompts: PromptSet  # in the order of the images
    has_prompts: bool  # whether any prompt was given; the texts are empty where not
    unused: int  # records of the file that name images which were not given


def match_prompts(images: Sequence[ImageFile], text: str | None, file: str | None) -> ImagePrompts:
    """Give each image its prompt record.

    `text` goes to all. The records of `file` are matched by their key "file", "image" or
    "file_name" where they have one: a path as seen from the prompt file, as given, or inside the
    folder, or a file name that occurs once; by the number of the folder for images that lie as
    GenEval and `flowrl eval --suite` put them (00003/samples/0000.png is of the fourth record);
    else by order. Images in such folders bring their records along. Raises DataError if an image
    or, by order, a record is left over; ConfigError for both `text` and `file`.
    """
    if text is not None and file is not None:
        raise ConfigError("expected --prompt TEXT or --prompts FILE, not both")
    # one text, or none
    beside = _records_beside(images)
    if file is None and text is None and beside:
        places = [str(metadata_of(image)) for image in images]
        texts = [record["prompt"] for record in beside]
        return ImagePrompts(PromptSet(texts, beside, "", "", places), True, 0)
    if file is None:
        given_as = "without --prompts" if text is None else "with --prompt"
        places = [f"{image.name}, {given_as}" for image in images]
        records: list[Record] = [{"prompt": text or ""} for _ in images]
        prompts = PromptSet([text or ""] * len(images), records, "", "", places)
        return ImagePrompts(prompts, text is not None, 0)
    # the records of a file, by name where they have one
    given = load_prompts(file)
    named = set(chain.from_iterable(given.records))
    key = next((key for key in KEYS if key in named), None)
    rows: Sequence[int]
    if key is not None:
        rows = _by_name(given, images, key)
    elif beside:
        rows = _by_folder(given, images, beside)
    else:
        rows = _by_order(given, images)
    # in the order of the images
    records = [given.records[row] for row in rows]
    places = [given.places[row] for row in rows]
    prompts = PromptSet(given.texts_of(rows), records, given.name, given.path, places)
    return ImagePrompts(prompts, True, len(given) - len({*rows}))


def metadata_of(image: ImageFile) -> Path:
    """Return where the record of an image lies that was put as GenEval puts them."""
    return image.path.parent.parent / RECORD


def _records_beside(images: Sequence[ImageFile]) -> list[Record]:
    """Return the record of each image in GenEval's folders, 00000/metadata.jsonl beside
    00000/samples/0000.png; [] where one lies elsewhere."""
    known: dict[Path, Record] = {}
    found: list[Record] = []
    for image in images:
        file = metadata_of(image)
        if image.path.parent.name != "samples" or not file.parent.name.isdecimal():
            return []
        if file not in known:
            if not file.is_file():
                return []
            # exactly one: it is the record of all images of the folder
            records = load_prompts(file).records
            if len(records) != 1:
                raise DataError(f"{file}: expected one record, got {len(records)}")
            known[file] = records[0]
        found.append(known[file])
    return found


def _by_folder(
    given: PromptSet, images: Sequence[ImageFile], beside: Sequence[Record]
) -> list[int]:
    """Return the row of each image's record, which is the number of its folder. Raises DataError
    where there is no such record, or the folder holds images of another prompt."""
    rows = []
    for image, record in zip(images, beside, strict=True):
        row = int(metadata_of(image).parent.name)
        if row >= len(given) or given.texts[row] != record["prompt"]:
            got = f"{len(given)} records"
            if row < len(given):
                got = repr(given.texts[row])
            raise DataError(
                f"{given.path}: expected the prompt of {metadata_of(image)} as record {row + 1}, "
                f"{record['prompt']!r}, got {got}; leave --prompts out to take the folder's own"
            )
        rows.append(row)
    return rows


def _by_order(given: PromptSet, images: Sequence[ImageFile]) -> Sequence[int]:
    # as many records as images
    if len(given) != len(images):
        raise DataError(
            f"{given.path}: expected one record per image, got {len(given)} records for "
            f"{len(images)} images; or name the image in each record: "
            '{"file": "a.png", "prompt": ...}'
        )
    # and only one order that they can be in
    names = [image.name for image in images]
    natural = sorted(names, key=_natural)
    if names == sorted(names) != natural:
        at = next(i for i, (a, b) in enumerate(zip(names, natural, strict=True)) if a != b)
        raise DataError(
            f"{given.path}: are the records in the order of the names ({names[at]} comes here) or "
            f"of the numbers in them ({natural[at]})? Name the image in each record: "
            f'{{"file": {names[at]!r}, "prompt": ...}}'
        )
    return range(len(images))


def _natural(name: str) -> str:
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(20), name)


def _by_name(given: PromptSet, images: Sequence[ImageFile], key: str) -> list[int]:
    """Return the row of each image's record. Raises DataError for one without, or with two."""
    by_name, by_path = _named_rows(given, key)
    count = Counter(image.path.name for image in images)
    found: dict[int, None] = {}
    for image in images:
        # as seen from the prompt file first, then as given, then by a file name that occurs once
        names = [str(image.path), image.name]
        if count[image.path.name] == 1:
            names.append(image.path.name)
        hits = [by_path.get(image.path.resolve()), *map(by_name.get, names)]
        row = next((hit for hit in hits if hit is not None), None)
        # a record of its own
        if row is None or row in found:
            got = "none" if row is None else "one that another image has taken"
            raise DataError(
                f"{given.path}: expected a record with {image.name!r} as {key!r}, got {got}"
            )
        found[row] = None
    return list(found)


def _named_rows(given: PromptSet, key: str) -> tuple[dict[str, int], dict[Path, int]]:
    """Return the row of each record by the image that it names, and by that file's path."""
    rows: dict[str, int] = {}
    paths: dict[Path, int] = {}
    folder = Path(given.path).parent
    for row, record in enumerate(given.records):
        # every record names an image
        name = record.get(key)
        if not isinstance(name, str) or not name:
            raise DataError(
                f"{given.places[row]}: expected the image's file as {key!r}, as in other records"
            )
        # another one than those before
        path = (folder / name).resolve()
        if name in rows or path in paths:
            first = given.places[paths[path]]
            raise DataError(
                f"{given.places[row]}: expected one record per image, {name!r} has one already "
                f"({first})"
            )
        rows[name] = paths[path] = row
    return rows, paths
