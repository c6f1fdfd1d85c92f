"""Votes of people on pairs of images, and questions that wait for them: a folder that several
processes share.

``votes.jsonl`` has a vote a line, ``images/`` the images under names made of their contents, and
``questions/`` a file for each group of images that somebody, such as a run in training, wants
compared. A line is a preference record as `flowrl pairs` and offline Diffusion-DPO read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import RunError
from flowrl.core.files import delete, parse_json, read_json, replacing, write_json

VOTES, QUESTIONS, IMAGES = "votes.jsonl", "questions", "images"
Record = dict[str, Any]
_Question = dict[str, list[list[str | list[str]]]]  # {"pairs": [[prompt, one, two, sources]]}


class VotePair(NamedTuple):
    """Two images of a prompt, as files seen from the folder, the smaller name first; and the images
    that both start from."""

    prompt: str
    first: str
    second: str
    sources: tuple[str, ...] = ()


class VoteQuestion(NamedTuple):
    """Pairs that somebody waits for."""

    key: str
    pairs: list[VotePair]


def keep_image(folder: Path, png: bytes) -> str:
    """Keep an image under a name made of its contents -> its path as seen from the folder."""
    name = f"{IMAGES}/{hashlib.blake2b(png, digest_size=12).hexdigest()}.png"
    if not (folder / name).exists():
        with replacing(folder / name) as draft:
            draft.write_bytes(png)
    return name


def pair_of(prompt: str, one: str, two: str, sources: Iterable[str] = ()) -> VotePair:
    """Return the pair of two images, whichever is named first."""
    first, second = sorted((one, two))
    return VotePair(prompt, first, second, tuple(sources))


def pair_in(vote: Record) -> VotePair:
    """Return the pair that a vote is on. One of an edit names its ``source``; earlier votes name
    none, and count as votes on a pair that was shown without it."""
    return pair_of(vote["prompt"], vote["image_0"], vote["image_1"], vote.get("source", ()))


def append_vote(folder: Path, record: Record) -> None:
    """Add a vote, whole and on the disk when this returns, whoever else is voting.

    Raises RunError where it cannot be written; then nothing was counted.
    """
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    file = folder / VOTES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # one writer at a time; a line that a crash cut short goes first
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = _whole_lines(handle)
            try:
                _write(handle, line)
            except OSError:
                # no half a line stays behind, on a full disk for example
                os.ftruncate(handle, size)
                raise
            # on the disk before the voter is told that it counts
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise RunError(
            f"cannot write {file}: {error.strerror or error}; the vote is not counted"
        ) from error


def _whole_lines(handle: int) -> int:
    """Cut off a torn last line, which was never confirmed -> the file's size."""
    size = os.fstat(handle).st_size
    while size and os.pread(handle, 1, size - 1) != b"\n":
        size -= 1
    os.ftruncate(handle, size)
    return size


def _write(handle: int, line: bytes) -> None:
    while line:
        line = line[os.write(handle, line) :]


def read_votes(folder: Path) -> list[Record]:
    """Read all votes; a torn last line is left out. Raises RunError naming the line."""
    file = folder / VOTES
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        # a write that was cut short; its voter was never told that it counts
        if not line.endswith(b"\n"):
            break
        try:
            found.append(_checked(parse_json(line, "the line", error=ValueError)))
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{file}, line {number}: expected a vote, got {line[:60]!r}: {error}"
            ) from error
    return found


def _checked(record: Any) -> Record:
    texts = [record[key] for key in ("prompt", "image_0", "image_1", "voter")]
    if not _are_texts(texts) or record["label_0"] not in (0, 0.5, 1):
        raise ValueError("prompt, image_0, image_1 and voter are texts, label_0 is 0, 0.5 or 1")
    names = [record.get("name_0", ""), record.get("name_1", "")]
    if type(record["label_0"]) is bool or not _are_texts(names):
        raise ValueError("label_0 is a number, name_0 and name_1 are texts")
    sources = record.get("source", [])
    if not isinstance(sources, list) or not _are_texts(sources):
        raise ValueError("source is a list of texts")
    return dict(record)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def last_votes(votes: Iterable[Record]) -> list[Record]:
    """Keep the last vote of each voter on each pair."""
    last: dict[tuple[str, VotePair], Record] = {}
    for vote in votes:
        key = (vote["voter"], pair_in(vote))
        last.pop(key, None)
        last[key] = vote
    return list(last.values())


def opinions(votes: Iterable[Record]) -> dict[VotePair, list[float]]:
    """Return what each voter said of each pair: 1 where its first image is preferred, 0 where the
    second is, 0.5 for a tie."""
    found: dict[VotePair, list[float]] = {}
    for vote in last_votes(votes):
        pair = pair_in(vote)
        label = float(vote["label_0"])
        if pair.first != vote["image_0"]:
            label = 1 - label
        found.setdefault(pair, []).append(label)
    return found


def ask_people(folder: Path, pairs: Sequence[VotePair]) -> VoteQuestion:
    """Put pairs before people; the same ones again are the same question."""
    rows = []
    for pair in pairs:
        row: list[Any] = [pair.prompt, pair.first, pair.second]
        if pair.sources:
            row.append(pair.sources)
        rows.append(row)
    key = hashlib.blake2b(json.dumps(rows).encode(), digest_size=12).hexdigest()
    write_json(folder / QUESTIONS / f"{key}.json", {"pairs": rows})
    return VoteQuestion(key, list(pairs))


def withdraw(folder: Path, question: VoteQuestion) -> None:
    """Take a question back; votes on it stay."""
    delete(folder / QUESTIONS / f"{question.key}.json")


def questions(folder: Path) -> list[VoteQuestion]:
    """Return what waits for people. A file that is no question is left out with a warning: whoever
    wrote it gets no votes."""
    found = []
    for file in sorted((folder / QUESTIONS).glob("*.json")):
        try:
            raw = read_json(file, _Question)["pairs"]
            pairs = [_asked(*row) for row in raw]
        except (OSError, RunError, KeyError, TypeError) as error:
            warnings.warn(f"a question is left out: {error}", stacklevel=2)
            continue
        names = [pair[1:3] + pair.sources for pair in pairs]
        if all(map(_inside, itertools.chain.from_iterable(names))):
            found.append(VoteQuestion(file.stem, pairs))
    return found


def _asked(prompt: str, one: str, two: str, sources: Sequence[str] = ()) -> VotePair:
    """Read a pair of a question, whose last part only edits have."""
    if not _are_texts([prompt, one, two]) or isinstance(sources, str):
        raise TypeError(f"expected texts and a list of sources, got {prompt!r:.40}")
    return pair_of(prompt, one, two, sources)


def _inside(name: str) -> bool:
    """Say whether a name is one that `keep_image` gives."""
    folder, _, file = name.partition("/")
    return folder == IMAGES and file.endswith(".png") and file[:-4].isalnum()
