"""Read pictures that a user hands over, PNG, JPEG and WebP files of any size, and give each its prompt record."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from flowrl.errors import ConfigError, DataError
from flowrl.prompts import PromptSet, Record, load_prompts

FORMATS = ("PNG", "JPEG", "WEBP")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
MAX_PIXELS = 2**26  # 67 million: a file of a few kilobytes can claim any size, and would fill the memory
KEYS = ("file", "image")  # of a prompt record that may name its picture; the first one wins
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


class Picture(NamedTuple):
    """A picture file whose header was read."""

    path: Path
    name: str  # how it is shown: its path inside the one folder that was given, else its path
    size: tuple[int, int]  # height, width in pixels, the right way up
    turn: int  # EXIF orientation, 1 = none
    moves: bool  # it has several frames


def find_pictures(paths: Sequence[str | os.PathLike[str]]) -> list[Picture]:
    """Open the headers of files, and of all pictures in and below folders, each folder sorted by path.

    Raises DataError naming the file if one is missing, no PNG, JPEG or WebP, larger than `MAX_PIXELS`, or given twice.
    """
    found: dict[Path, Picture] = {}
    for file, name in _files([Path(path) for path in paths]):
        whole = file.resolve()
        if whole in found:
            raise DataError(f"{file}: given twice (also as {found[whole].path}); name each picture once")
        found[whole] = _header(file, name)
    return list(found.values())


def _files(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        if not path.is_dir():
            yield path, str(path)
            continue
        below = (
            file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file()
        )
        names = sorted((n for n in below if not any(part.startswith(".") for part in n.parts)), key=Path.as_posix)
        if not names:
            raise DataError(f"{path}: expected a folder with pictures ({', '.join(ENDINGS)}), found none in it")
        for name in names:
            yield path / name, name.as_posix() if len(paths) == 1 else str(path / name)


def _header(path: Path, name: str) -> Picture:
    with _open(path) as image:
        turn = _orientation(image, path)
        size = (image.width, image.height) if turn >= 5 else (image.height, image.width)
        # A phone's JPEG can carry a second, smaller picture (MPO); that is no animation.
        return Picture(path, name, size, turn, image.format != "MPO" and getattr(image, "n_frames", 1) > 1)


def _open(path: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is the stricter one
            image = Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"{path}: more than {MAX_PIXELS:,} pixels; make it smaller ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: expected a PNG, JPEG or WebP picture, got something else or a broken file") from error
    except Exception as error:  # missing, no permission, a damaged header: Pillow raises all sorts
        raise DataError(f"{path}: cannot be read as a picture: {_words(error)}") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise DataError(f"{path}: expected at most {MAX_PIXELS:,} pixels, got {image.width} x {image.height}")
    return image


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _orientation(image: Image.Image, path: Path) -> int:
    # Asked for EXIF data, Pillow decodes a whole PNG, since they may stand at its end; few have any.
    if image.format == "PNG" and "exif" not in image.info and b"eXIf" not in path.read_bytes():
        return 1
    try:
        turn = image.getexif().get(_ORIENTATION, 1)
    except Exception as error:
        raise DataError(f"{path}: a damaged picture: {_words(error)}") from error
    return turn if turn in _TURNS else 1


def read_picture(picture: Picture) -> tuple[Tensor, list[str]]:
    """Decode -> pixels [3, H, W] uint8 and what was done to them, for a note. Raises DataError naming the file.

    Turned as EXIF says; grey, palette, CMYK and 16-bit pictures become RGB of 8 bits; transparent ones are laid on
    white; of several frames the first is taken. Colour profiles are not applied.
    """
    notes = ["only the first frame"] if picture.moves else []
    with _open(picture.path) as image:
        try:
            rgb, see_through = _rgb(image)
        except Exception as error:  # cut off, broken checksums, memory
            raise DataError(f"{picture.path}: a damaged picture: {_words(error)}") from error
    if see_through:
        notes.append("transparency laid on white")
    if picture.turn in _TURNS:
        rgb = rgb.transpose(_TURNS[picture.turn])
        notes.append("turned as EXIF says")
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous(), notes


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


class Words(NamedTuple):
    """What goes with pictures, one record each."""

    prompts: PromptSet  # in the order of the pictures
    told: bool  # whether a prompt was given; the texts are empty where not
    left: int  # records of the file that name pictures which were not given


def pair(pictures: Sequence[Picture], text: str | None, file: str | None) -> Words:
    """Give each picture its prompt record.

    `text` goes to all. The records of `file` are matched by their key "file" or "image" where they have one: a path as
    seen from the prompt file, as given, or inside the folder, or a file name that occurs once; else by order.
    Raises DataError if a picture or, by order, a record is left over; ConfigError for both `text` and `file`.
    """
    if text is not None and file is not None:
        raise ConfigError("expected --prompt TEXT or --prompts FILE, not both")
    if file is None:
        given_as = "without --prompts" if text is None else "with --prompt"
        places = [f"{picture.name}, {given_as}" for picture in pictures]
        records: list[Record] = [{"prompt": text or ""} for _ in pictures]
        return Words(PromptSet([text or ""] * len(pictures), records, "", "", places), text is not None, 0)
    given = load_prompts(file)
    key = next((key for key in KEYS if any(key in record for record in given.records)), None)
    rows = _by_order(given, pictures) if key is None else _by_name(given, pictures, key)
    records, places = [given.records[row] for row in rows], [given.places[row] for row in rows]
    prompts = PromptSet([record["prompt"] for record in records], records, given.name, given.path, places)
    return Words(prompts, True, len(given) - len(rows))


def _by_order(given: PromptSet, pictures: Sequence[Picture]) -> Sequence[int]:
    if len(given) != len(pictures):
        raise DataError(
            f"{given.path}: expected one record per picture, got {len(given)} records for {len(pictures)} pictures; or "
            f'name the picture in each record: {{"file": "a.png", "prompt": ...}}'
        )
    names = [picture.name for picture in pictures]
    natural = sorted(names, key=_natural)
    if names == sorted(names) != natural:
        at = next(i for i, (a, b) in enumerate(zip(names, natural, strict=True)) if a != b)
        raise DataError(
            f"{given.path}: are the records in the order of the names ({names[at]} comes here) or of the numbers in "
            f'them ({natural[at]})? Name the picture in each record: {{"file": {names[at]!r}, "prompt": ...}}'
        )
    return range(len(pictures))


def _natural(name: str) -> str:
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(20), name)


def _by_name(given: PromptSet, pictures: Sequence[Picture], key: str) -> list[int]:
    rows: dict[str, int] = {}
    paths: dict[Path, int] = {}
    folder = Path(given.path).parent
    for row, record in enumerate(given.records):
        name = record.get(key)
        if not isinstance(name, str) or not name:
            raise DataError(f"{given.places[row]}: expected the picture's file as {key!r}, as in other records")
        path = (folder / name).resolve()
        if name in rows or path in paths:
            first = given.places[paths[path]]
            raise DataError(f"{given.places[row]}: expected one record per picture, {name!r} has one already ({first})")
        rows[name] = paths[path] = row
    count = Counter(picture.path.name for picture in pictures)
    found: dict[int, None] = {}
    for picture in pictures:
        names = [str(picture.path), picture.name, *([picture.path.name] if count[picture.path.name] == 1 else [])]
        hits = [paths.get(picture.path.resolve()), *map(rows.get, names)]  # as seen from the prompt file comes first
        hit = next((row for row in hits if row is not None), None)
        if hit is None or hit in found:
            raise DataError(
                f"{given.path}: expected a record with {picture.name!r} as {key!r}, got "
                f"{'none' if hit is None else 'one that another picture has taken'}"
            )
        found[hit] = None
    return list(found)
