"""What goes to a reward server and what comes back: requests packed, answers believed only if all is right."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from flowrl.errors import ConfigError, DataError, RewardError
from flowrl.types import RewardBatch
from rewards._scorer import to_pil

WHO = "rewards.remote"
LARGEST = torch.finfo(torch.float32).max


class Failed(Exception):
    """A request that another try may answer; the text says why."""


class Unanswered(Exception):
    """A request that nobody answered, with addresses and reasons."""


def check_url(url: str) -> str:
    """Return the address without a slash at its end. Raises ConfigError, without showing a password in it."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0) and parts.scheme in ("http", "https")
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        shown = url.rpartition("@")[2]
        raise ConfigError(
            f"{WHO}: urls: expected addresses like http://10.0.0.5:8321, got {shown!r}; no user names, passwords or "
            "queries: a token goes into an environment variable that token_env names"
        )
    return url.rstrip("/")


def token(name: str) -> str:
    """Return the token in the environment variable `name`, "" for no name. Raises ConfigError without showing it."""
    if not name:
        return ""
    value = os.environ.get(name, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise ConfigError(f"{WHO}: token_env: expected a token of printable ASCII in the environment variable {name}")
    return value


def chunks_of(batch: RewardBatch, size: int) -> list[list[int]]:
    """Deal the rows out to requests of `size` pictures; pictures of one group and prompt stay together."""
    units: dict[tuple[int, str], list[int]] = {}
    for row, key in enumerate(zip(batch.group.tolist(), batch.prompts, strict=True)):
        units.setdefault(key, []).append(row)
    chunks: list[list[int]] = []
    for rows in units.values():
        if chunks and len(chunks[-1]) + len(rows) <= size:
            chunks[-1].extend(rows)
        else:
            chunks.append(list(rows))
    return chunks


def pack(batch: RewardBatch, rows: list[int], reward: str) -> bytes:
    """Write the body of a request. Raises DataError for a NaN picture or a record that JSON cannot hold."""
    keys = [(int(batch.group[row]), batch.prompts[row]) for row in rows]
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    data: dict[str, Any] = {
        "images": [_png(image) for image in to_pil(batch.images[rows])],
        "prompts": [batch.prompts[row] for row in rows],
        "group": [number[key] for key in keys],
        "meta": [batch.meta[row] for row in rows] if batch.meta else [{} for _ in rows],
        "sigma": batch.sigma[rows].tolist(),
        **({"rewards": [reward]} if reward else {}),
    }
    try:
        return json.dumps(data, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{WHO}: a record of prompt {batch.prompts[rows[0]]!r} or others cannot be sent: {error}"
        ) from error


def _png(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


async def exchange(client: Any, method: str, url: str, body: bytes, timeout: float, count: int) -> bytes:
    """Return the answer to one request about `count` pictures, all of it within `timeout` seconds.

    Raises Failed where another try may help; DataError or RewardError for what the server refuses for good.
    """
    import httpx2

    most, parts = 2**16 + 1024 * count, bytearray()
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    try:
        async with (
            asyncio.timeout(timeout),
            client.stream(method, url, content=body, headers=headers) as response,
        ):
            async for part in response.aiter_raw():
                parts += part
                if len(parts) > most:
                    raise Failed(f"an answer of more than {most} bytes")
    except TimeoutError:
        raise Failed(f"no answer within {timeout:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise Failed(f"{type(error).__name__}: {error}".rstrip(": ")) from None
    if response.status_code != 200:
        secret = client.headers.get("authorization", "").removeprefix("Bearer ").encode()
        raise _refusal(response.status_code, bytes(parts.replace(secret, b"***") if secret else parts), url)
    return bytes(parts)


def _refusal(status: int, data: bytes, url: str) -> Exception:
    """Return the exception for an answer other than 200. Only a reward server's own words are final."""
    try:
        answer = json.loads(data)
        kind, text = str(answer["kind"]), " ".join(str(answer["error"]).split())[:1000]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Failed(f"HTTP {status}: {_start(data)}")
    if kind == "data":
        return DataError(f"{WHO}: {url}: {text}")
    if kind == "token":
        return RewardError(
            f"{WHO}: {url} refuses the token (HTTP {status}); set token_env to the variable that holds it"
        )
    if kind in ("request", "size"):
        return RewardError(f"{WHO}: {url} refuses the request (HTTP {status}): {text}")
    return Failed(f"HTTP {status}: {text}")


def read_scores(data: bytes, reward: str, count: int) -> Tensor:
    """Return the scores [count] of an answer, NaN for null. Raises Failed unless everything about it is right."""
    scores = _object(data).get("scores")
    if not isinstance(scores, dict):
        raise Failed(f"expected an object with scores, got {_start(data)}")
    if not reward and len(scores) > 1:
        raise ConfigError(f"{WHO}: reward: the server hosts {', '.join(map(str, scores))}; name one of them")
    if len(scores) != 1 or (reward and reward not in scores):
        raise Failed(f"expected scores of {reward or 'one reward'}, got those of {list(scores)[:5]}")
    values = next(iter(scores.values()))
    if not isinstance(values, list) or len(values) != count:
        got = f"{len(values)} of them" if isinstance(values, list) else type(values).__name__
        raise Failed(f"expected a list of {count} scores, got {got}")
    return torch.tensor([_score(value) for value in values], dtype=torch.float32)


def _score(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST:
        raise Failed(f"expected a finite number or null as a score, got {str(value)[:40]!r}")
    return float(value)


def read_health(data: bytes, url: str, reward: str, chunk: int) -> None:
    """Check that a server hosts the reward and takes such requests. Raises ConfigError; Failed for another server."""
    answer = _object(data)
    hosted, limits = answer.get("rewards"), answer.get("limits", {})
    if not isinstance(hosted, list) or not isinstance(limits, dict):
        raise Failed(f"expected the health of a reward server, got {_start(data)}")
    there = ", ".join(map(str, hosted))
    if reward and reward not in hosted:
        raise ConfigError(f"{WHO}: reward: {url} hosts no {reward!r} (there is: {there})")
    if not reward and len(hosted) != 1:
        raise ConfigError(f"{WHO}: reward: {url} hosts {there}; name one of them")
    most = limits.get("images", chunk)
    if isinstance(most, int) and chunk > most:
        raise ConfigError(f"{WHO}: chunk: {url} takes at most {most} pictures per request, got {chunk}")


def _object(data: bytes) -> dict[str, Any]:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        answer = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Failed(f"expected JSON, got {_start(data)} ({error})") from None
    if not isinstance(answer, dict):
        raise Failed(f"expected a JSON object, got {_start(data)}")
    return answer


def _start(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", "replace")) if data else "nothing"
