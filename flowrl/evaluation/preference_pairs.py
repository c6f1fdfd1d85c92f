"""Pairs of images of which one is preferred, as records of a prompt list name them, and preference
data of the usual formats turned into such a list.

A record has ``image_0`` and ``image_1``, paths as seen from the list, and ``label_0``: 1 where the
first is preferred, 0 where the second is, 0.5 for a tie, which trains nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, install
from flowrl.core.files import parse_json, replacing, write_text
from flowrl.core.prompt_files import text_of
from flowrl.core.prompts import PromptSet, Record, load_prompts
from flowrl.evaluation.image_files import ENDINGS, find_images, read_fitted
from flowrl.evaluation.sources import SOURCE, named_images
from flowrl.evaluation.votes import opinions

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
    names = [*map(record.get, IMAGES)]
    if not all(isinstance(name, str) and name for name in names):
        raise DataError(
            f"{where}: expected the files of two images as {IMAGES[0]!r} and {IMAGES[1]!r}, got "
            f"{names[0]!r} and {names[1]!r}; `flowrl pairs` writes such a list"
        )
    images = folder / str(names[0]), folder / str(names[1])
    return PreferencePair(images, label_of(record, where))


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


# ------------------------------------------------------------------------ data of the usual formats


PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0")
HAS_LABEL = "has_label"  # of Pick-a-Pic: false where nobody voted, whatever label_0 says
LIST = "pairs.jsonl"
_MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}


class SourcePair(NamedTuple):
    """A pair as a source has it. Images are files, or the bytes of one."""

    prompt: str
    images: tuple[Path | bytes, Path | bytes]
    label: float | None  # None where nobody voted
    where: str
    starts: tuple[Path, ...] = ()  # what both images start from


class Converted(NamedTuple):
    """What became of a source."""

    file: Path
    kept: int
    ties: int
    dropped: list[str]  # why each bad pair was left out
    unlabelled: int  # pairs that nobody voted on


def convert_pairs(source: Path, out: Path, *, drop: bool = False) -> Converted:
    """Write the pairs of a source into ``out/pairs.jsonl``, images beside it -> what was done.

    Sources: a parquet file or a folder of them in Pick-a-Pic's columns; a JSON or JSONL file in
    HPD's keys (``image_path`` and ``human_preference``, or ``path1`` preferred to ``path2``) or in
    flowrl's, also the votes of `flowrl view`, of which the majority counts; a folder with
    ``better/``, ``worse/`` and a text file of each name. Ties are left out, and so is what nobody
    voted on (``has_label`` false).
    A pair that cannot be learnt from (see `check_pairs`) is an error, or left out with `drop`.

    Raises: DataError naming the pair; ConfigError for a format that is not known, or parquet
    without pyarrow.
    """
    (out / "images").mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    bad, ties, unlabelled = [], 0, 0
    better: dict[Hashable, str] = {}
    # pairs come one by one: a data set does not have to fit into memory
    for pair in _pairs_of(source):
        if pair.label is None or pair.label == 0.5:
            ties += pair.label is not None
            unlabelled += pair.label is None
            continue
        try:
            records.append(_kept(pair, out, better))
        except DataError as error:
            if not drop:
                raise DataError(f"{error}. Or leave such pairs out with --drop") from error
            bad.append(str(error))
    if not records:
        raise DataError(
            f"{source}: no pair is left ({ties} ties, {unlabelled} without a vote, {len(bad)} that "
            "cannot be used)"
        )
    # the list is written last, when all of its images are there
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    write_text(out / LIST, "".join(lines))
    # read back as training reads it
    if not bad:
        check_pairs(load_prompts(out / LIST))
    return Converted(out / LIST, len(records), ties, bad, unlabelled)


def _kept(pair: SourcePair, out: Path, better: dict[Hashable, str]) -> Record:
    """Copy the images of a pair under names made of their contents -> its record. Raises DataError
    for what cannot be learnt."""
    if not pair.prompt.strip():
        raise DataError(f"{pair.where}: the prompt is empty")
    assert pair.label is not None  # those without a vote were left out
    names = [_stored(image, out, pair.where) for image in pair.images]
    check_pair_images(PreferencePair((out / names[0], out / names[1]), pair.label), pair.where)
    starts = [_stored(image, out, pair.where) for image in pair.starts]
    key = (pair.prompt, frozenset(names), *starts)
    preferred = names[int(pair.label == 0)]
    if better.setdefault(key, preferred) != preferred:
        raise DataError(f"{pair.where}: the same pair was labelled the other way round before")
    record = {"prompt": pair.prompt, **dict(zip(IMAGES, names, strict=True)), LABEL: pair.label}
    if starts:
        record[SOURCE] = starts
    return record


def _stored(image: Path | bytes, out: Path, where: str) -> str:
    """Copy an image -> its path as seen from the list."""
    if isinstance(image, Path):
        if not image.is_file():
            raise DataError(f"{where}: there is no image {image}")
        image = image.read_bytes()
    ending = next((end for magic, end in _MAGIC.items() if image.startswith(magic)), None)
    if ending is None:
        raise DataError(f"{where}: expected a PNG, JPEG or WebP image, got {image[:8]!r} ...")
    name = f"images/{hashlib.blake2b(image, digest_size=12).hexdigest()}{ending}"
    # one that is there may have been torn by a power cut, or by another program
    file = out / name
    if not file.is_file() or file.read_bytes() != image:
        with replacing(file) as draft:
            draft.write_bytes(image)
    return name


def _pairs_of(source: Path) -> Iterator[SourcePair]:
    """Read a source in whichever format it is."""
    if not source.exists():
        raise ConfigError(f"{source}: there is no such file or folder")
    if source.suffix == ".parquet" or any(source.glob("*.parquet")):
        files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
        for file in files:
            yield from _parquet(file)
    elif source.is_dir():
        yield from _folder(source)
    else:
        items = _items(source)
        if items and all(isinstance(item, dict) and "voter" in item for item in items):
            items = by_majority(items)
        for number, item in enumerate(items, 1):
            yield _json_pair(item, f"{source}, entry {number}", source.parent)


def _items(source: Path) -> list[Any]:
    if source.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"{source}: expected preference data as .parquet, .json, .jsonl or a folder, got "
            f"{source.suffix or 'no ending'!r}"
        )
    text = text_of(source)
    if source.suffix == ".jsonl":
        # only "\n" ends a line: JSON allows U+2028 inside a text
        items = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                items.append(parse_json(line, f"{source}, line {number}", error=DataError))
        return items
    items = parse_json(text, str(source), error=DataError)
    if not isinstance(items, list):
        raise DataError(f"{source}: expected a list of pairs, got {type(items).__name__}")
    return items


def by_majority(votes: list[Any]) -> list[Record]:
    """Return one record per pair of `flowrl view`'s votes: the image that more voters prefer is
    better, and a draw is a tie."""
    try:
        said = opinions(votes)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"a vote is not what `flowrl view` writes: {error!r}") from error
    found: list[Record] = []
    for pair, labels in said.items():
        label = _label(sum(labels), len(labels) / 2)
        images = dict(zip(IMAGES, (pair.first, pair.second), strict=True))
        record = {"prompt": pair.prompt, **images, LABEL: label}
        if pair.sources:
            record[SOURCE] = list(pair.sources)
        found.append(record)
    return found


def _label(first: float, second: float) -> float:
    """Return 1 where the first number is larger, 0 where the second is, 0.5 for a tie."""
    if first == second:
        return 0.5
    return float(first > second)


def _json_pair(item: Any, where: str, folder: Path) -> SourcePair:
    """Read an entry with HPD's keys, or with flowrl's."""
    try:
        label: float | None
        # label 1: the first is better, 0: the second, 0.5: a tie
        prompt = _text(item["prompt"], where)
        if "human_preference" in item:  # HPDv2: [1, 0] prefers the first
            first, second = item["image_path"]
            liked = [float(value) for value in item["human_preference"]]
            if len(liked) != 2 or not all(map(math.isfinite, liked)):
                raise ValueError(f"two finite numbers as human_preference, got {liked}")
            label = _label(*liked)
        elif "path1" in item:  # HPDv3: the first is preferred
            first, second, label = item["path1"], item["path2"], 1.0
        else:
            first, second = item[IMAGES[0]], item[IMAGES[1]]
            label = _tie_or(float(item[LABEL]), where, LABEL)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{where}: expected prompt, image_path and human_preference of two images (HPDv2), "
            f"prompt, path1 and path2 (HPDv3), or prompt, {', '.join(IMAGES)} and {LABEL}; "
            f"{type(error).__name__}: {error}"
        ) from error
    if not _voted(item):
        label = None
    starts = tuple(folder / name for name in named_images(item))
    return SourcePair(prompt, (folder / str(first), folder / str(second)), label, where, starts)


def _folder(source: Path) -> Iterator[SourcePair]:
    """Read ``better/NAME.png``, ``worse/NAME.png`` and ``NAME.txt``."""
    # the same name on both sides makes a pair, whatever the endings are
    better = {file.stem: file for file in sorted((source / "better").glob("*")) if _image(file)}
    worse = {file.stem: file for file in sorted((source / "worse").glob("*")) if _image(file)}
    if not better and not worse:
        raise ConfigError(
            f"{source}: expected a folder with better/, worse/ and NAME.txt, or *.parquet in it"
        )
    for name in sorted({*better, *worse}):
        text = source / f"{name}.txt"
        # all that a pair lacks, in one message
        missing = []
        for side, names in (("better", better), ("worse", worse)):
            if name not in names:
                missing.append(str(source / side / name))
        if not text.is_file():
            missing.append(str(text))
        if missing:
            raise DataError(f"{source}: of the pair {name!r} there is no {', '.join(missing)}")
        prompt = text_of(text).strip()
        yield SourcePair(prompt, (better[name], worse[name]), 1.0, f"{source}, {name}")


def _image(file: Path) -> bool:
    return file.suffix.lower() in ENDINGS


def _parquet(file: Path) -> Iterator[SourcePair]:
    """Read Pick-a-Pic's columns, a few rows at a time."""
    try:
        # an optional package: only this format needs it
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{file}: parquet is read by pyarrow: {install('pairs')}") from error
    try:
        table = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: expected a parquet file, got a fault in it: {error}") from error
    lacks = [name for name in PICK_A_PIC if name not in table.schema_arrow.names]
    if lacks:
        raise DataError(
            f"{file}: expected Pick-a-Pic's columns {', '.join(PICK_A_PIC)}, it lacks "
            f"{', '.join(lacks)}"
        )
    known = [*PICK_A_PIC, *({HAS_LABEL} & {*table.schema_arrow.names})]
    # the images are in the file, so a batch may be large
    number = 0
    for batch in table.iter_batches(batch_size=64, columns=known):
        for row in batch.to_pylist():
            number += 1
            where = f"{file}, row {number}"
            # a row that nobody voted on has a label all the same
            if not _voted(row):
                yield SourcePair("", (b"", b""), None, where)
                continue
            images = tuple(row[name] for name in PICK_A_PIC[1:3])
            if not all(isinstance(image, bytes) for image in images):
                raise DataError(f"{where}: expected the bytes of two JPEG files in jpg_0 and jpg_1")
            prompt, label = _text(row["caption"], where), _tie_or(row["label_0"], where)
            yield SourcePair(prompt, images, label, where)


def _text(value: Any, where: str) -> str:
    """Return the prompt of a pair; a null is an empty one, which nothing is learnt from."""
    if value is None or isinstance(value, str):
        return value or ""
    raise DataError(f"{where}: expected a text as prompt, got {value!r:.60}")


def _voted(row: dict[str, Any]) -> bool:
    """Say whether somebody voted on a row; a table that was written as text says it in words."""
    said = row.get(HAS_LABEL, True)
    return str(said).strip().lower() not in ("false", "0", "0.0", "none", "", "nan")


def _tie_or(label: Any, where: str, name: str = PICK_A_PIC[3]) -> float:
    if label not in (0, 0.5, 1):
        raise DataError(f"{where}: expected {name} 0, 0.5 or 1, got {label!r}")
    return float(label)
