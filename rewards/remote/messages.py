"""Requests and answers of the HTTP protocol as a client writes and reads them; an answer is
believed only if all of it is right."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RewardError, printable
from flowrl.core.files import parse_json
from flowrl.core.types import RewardBatch, Source

from .._common.http_client import RequestFailed, asked_pause
from .._common.scorer import to_pil

WHO = "rewards.remote"
LARGEST = torch.finfo(torch.float32).max


LONGEST = 10.0  # seconds of a rest, or between two tries


class ServerFull(RequestFailed):
    """A server that holds as many images as it may, and the seconds until it is asked again."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


def longest_answer(count: int) -> int:
    """Return how many bytes an answer about `count` images may have."""
    return 2**16 + 1024 * count


def chunks_of(batch: RewardBatch, size: int, *, apart: bool = False) -> list[list[int]]:
    """Deal the rows out to requests of `size` images, frames of a video counted each; those of one
    group and prompt stay together, unless `apart`."""
    videos = batch.images.dim() == 5
    size = max(1, size // batch.images.shape[1]) if videos else size
    units: dict[tuple[int, str] | int, list[int]] = {}
    for row, key in enumerate(zip(batch.group.tolist(), batch.prompts, strict=True)):
        units.setdefault(row if apart else key, []).append(row)
    chunks: list[list[int]] = []
    for rows in units.values():
        if chunks and len(chunks[-1]) + len(rows) <= size:
            chunks[-1].extend(rows)
        else:
            chunks.append(list(rows))
    return chunks


def pack(batch: RewardBatch, rows: list[int], reward: str) -> bytes:
    """Write the body of a request; frames of a video go one after the other. Raises DataError for
    a NaN image or a record that JSON cannot hold."""
    # groups are numbered from 0 within the request
    keys = [(int(batch.group[row]), batch.prompts[row]) for row in rows]
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    images = batch.images[rows]
    videos = images.dim() == 5
    data: dict[str, Any] = {
        "images": [_png(image) for image in to_pil(images.flatten(0, 1) if videos else images)],
        "prompts": [batch.prompts[row] for row in rows],
        "group": [number[key] for key in keys],
        "meta": [batch.meta[row] if batch.meta else {} for row in rows],
        "sigma": batch.sigma[rows].tolist(),
    }
    if videos:
        data["frames"] = images.shape[1]
    if batch.source:
        data |= _sources([batch.source[row] for row in rows])
    if reward:
        data["rewards"] = [reward]
    # as JSON
    try:
        return json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        first = batch.prompts[rows[0]]
        raise DataError(
            f"{WHO}: a record of prompt {first!r} or others cannot be sent: {error}"
        ) from error


def _sources(sources: list[Source]) -> dict[str, Any]:
    """Write what images start from: each file once under `sources`, and `source`, the places there
    of each image's."""
    files, places = dict[str, int](), dict[int, list[int]]()
    for source in sources:
        if id(source) not in places:
            packed = [_png(image) for start in source for image in to_pil(start[None])]
            places[id(source)] = [files.setdefault(file, len(files)) for file in packed]
    return {"sources": list(files), "source": [places[id(source)] for source in sources]}


def _png(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def refusal(status: int, data: bytes, url: str, retry_after: str | None = None) -> Exception:
    """Return the exception for an answer other than 200: DataError or RewardError for what the
    server refuses for good, RequestFailed where another try may help, ServerFull where it says
    when.

    Only a reward server's own words are final.
    """
    try:
        answer = _object(data)
        kind, text = str(answer["kind"]), _words(answer["error"])
    except (RequestFailed, KeyError):
        return RequestFailed(f"HTTP {status}: {_start(data)}")
    if kind == "data":
        return DataError(f"{WHO}: {url}: {text}")
    if kind == "token":
        return RewardError(
            f"{WHO}: {url} refuses the token (HTTP {status}); set token_env to the variable that "
            "holds it"
        )
    if kind in ("request", "size"):
        return RewardError(f"{WHO}: {url} refuses the request (HTTP {status}): {text}")
    said = f"HTTP {status}: {text}"
    if kind == "busy":
        return ServerFull(said, asked_pause(retry_after, LONGEST))
    return RequestFailed(said)


def read_scores(data: bytes, reward: str, count: int) -> Tensor:
    """Return the scores [count] of an answer, NaN for null. Raises RequestFailed unless
    everything about it is right."""
    # the scores of one reward
    scores = _object(data).get("scores")
    if not isinstance(scores, dict):
        raise RequestFailed(f"expected an object with scores, got {_start(data)}")
    if not reward and len(scores) > 1:
        raise ConfigError(
            f"{WHO}: reward: the server hosts {_words(', '.join(scores))}; name one of them"
        )
    if len(scores) != 1 or (reward and reward not in scores):
        raise RequestFailed(
            f"expected scores of {reward or 'one reward'}, got those of {list(scores)[:5]}"
        )
    # a number or null for each image
    values = next(iter(scores.values()))
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} of them" if isinstance(values, list) else type(values).__name__
        raise RequestFailed(f"expected a list of {count} scores, got {got}")
    return torch.tensor([_score(value) for value in values], dtype=torch.float32)


def _score(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        raise RequestFailed(f"expected a finite number or null as a score, got {str(value)[:40]!r}")
    return float(value)


class Hosted(NamedTuple):
    """A reward of a server."""

    name: str
    checks: bool  # the prompts' records
    singly: bool  # it compares nothing with others of the prompt


class Told(NamedTuple):
    """What a server says of itself beside what it hosts."""

    version: str  # of flowrl; "" where it does not say it
    settings: dict[str, Any] | None  # of the reward, fn and arguments; None where it does not


def read_health(data: bytes, url: str, reward: str, chunk: int, videos: bool = False) -> Hosted:
    """Check that a server hosts the reward, for videos or for images, and takes such requests.
    Raises ConfigError; RequestFailed for another server."""
    # is it a server of rewards at all?
    answer = _object(data)
    hosted, limits = answer.get("rewards"), answer.get("limits", {})
    if not isinstance(hosted, list) or not isinstance(limits, dict):
        raise RequestFailed(f"expected the health of a reward server, got {_start(data)}")
    # which of its rewards: the one that is named, or the only one
    there = _words(", ".join(map(str, hosted)))
    if reward and reward not in hosted:
        raise ConfigError(f"{WHO}: reward: {url} hosts no {reward!r} (there is: {there})")
    if not reward and len(hosted) != 1:
        raise ConfigError(f"{WHO}: reward: {url} hosts {there}; name one of them")
    # can it take requests of this size, and the kind of images that will be sent?
    most = limits.get("images", chunk)
    if isinstance(most, int) and chunk > most:
        raise ConfigError(
            f"{WHO}: chunk: {url} takes at most {most} images per request, got {chunk}"
        )
    name = reward or str(hosted[0])
    if _says(answer, "videos", name) != videos:
        raise ConfigError(f"{WHO}: videos: {url}: {_other_kind(name, videos)}")
    return Hosted(name, _says(answer, "checks", name), _says(answer, "singly", name))


def read_told(data: bytes, name: str) -> Told:
    """Read version and settings of the reward `name`, or of the only one, out of the answer that
    `read_health` or `read_scores` takes."""
    answer = _object(data)
    every = answer.get("settings")
    every = every if isinstance(every, dict) else {}
    settings = every.get(name or next(iter(every), ""))
    version = _words(answer.get("flowrl", ""))
    return Told(version, settings if isinstance(settings, dict) else None)


def other_settings(one: dict[str, Any], other: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """Say in which of the keys two rewards' settings differ: "target: 1.0 and 0.5"."""
    found = []
    for key in keys:
        a, b = one.get(key), other.get(key)
        if a != b:
            found.append(f"{_words(key)}: {_words(repr(a)):.80} and {_words(repr(b)):.80}")
    return found


def _says(answer: dict[str, Any], key: str, name: str) -> bool:
    names = answer.get(key, [])
    return isinstance(names, list) and name in names


def _other_kind(name: str, videos: bool) -> str:
    if videos:
        return (
            f"{name} judges images, got videos=true. Leave videos out and say how it judges the "
            "frames, as in frames: mean"
        )
    return f"{name} judges videos, got videos=false. Set videos: true"


def check_kind(batch: RewardBatch, videos: bool) -> None:
    """Raise DataError unless a batch holds videos [L, T, 3, H, W], or images [L, 3, H, W]."""
    if batch.images.dim() == (5 if videos else 4):
        return
    expected, mend = "images [L, 3, H, W]", "set videos: true, or say how to judge frames"
    if videos:
        expected, mend = "videos [L, T, 3, H, W]", "leave videos out"
    raise DataError(f"{WHO}: expected {expected}, got {list(batch.images.shape)}; {mend}")


def pack_records(reward: str, records: Sequence[Any], places: Sequence[str]) -> bytes:
    """Write the body of a request to check records. Raises DataError for what JSON cannot hold."""
    content = {"reward": reward, "records": list(records), "places": list(places)}
    try:
        return json.dumps(content, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{places[0]} or later: {WHO}: a record cannot be sent: {error}") from error


def read_fault(data: bytes) -> str | None:
    """Return what the server says of the first record that it refuses. Raises RequestFailed for
    another answer."""
    answer = _object(data)
    fault = answer.get("fault", 0)
    if fault is not None and not isinstance(fault, str):
        raise RequestFailed(f"expected a fault or null, got {_start(data)}")
    return None if fault is None else _words(fault)


def _words(text: Any) -> str:
    """Return a server's words for a message: short, on one line, and no commands to a terminal."""
    return printable(" ".join(str(text).split()))[:1000]


def _object(data: bytes) -> dict[str, Any]:
    try:
        answer = parse_json(data, "the answer", error=DataError, values=False)
    except DataError as error:
        raise RequestFailed(f"expected JSON, got {_start(data)} ({error})") from None
    if not isinstance(answer, dict):
        raise RequestFailed(f"expected a JSON object, got {_start(data)}")
    return answer


def _start(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace")) if data else "nothing"
