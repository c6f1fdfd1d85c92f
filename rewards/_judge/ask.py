"""A judge as rewards use it: questions about images in, in flowrl's own words or those of a config,
and what its answers are read as out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from flowrl.core.errors import ConfigError

from .accepting import find_answers
from .answer import Answer
from .client import (
    JudgeQuestion,
    Server,
    base_url,
    check_offered,
    check_server,
    request_settings,
)
from .images import EncodedImage, encode

Read = Callable[[Answer], Any]
"""``read(answer)`` -> its value, or a text that says what is wrong with it."""


class Job(NamedTuple):
    """One question about some images."""

    name: str  # for messages: "image 3, rule 2"
    shown: tuple[int, ...]  # which of the images, in the order that the judge sees them
    text: str


class Judge:
    """A vision-language model behind an OpenAI-compatible server. Equal questions are asked once;
    `cache` keeps answers that could be read. Raises ConfigError for wrong options."""

    def __init__(
        self,
        who: str,
        *,
        url: str,
        model: str,
        api_key_env: str | None,
        timeout: float,
        retries: int,
        backoff: float,
        workers: int,
        max_failed: float,
        encoding: str,
        cache: str | None,
        extra: dict[str, Any] | None,
    ) -> None:
        base = base_url(url, who)
        self.server = check_server(
            Server(base, api_key_env, timeout, retries, backoff, workers, max_failed, who)
        )
        self.likely = request_settings(model, True, None, extra, who)
        self.written = request_settings(model, False, None, extra, who)
        self.encoding = encoding
        self.cache = Path(cache).expanduser() if cache is not None else None

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError if it does not answer, or has another."""
        check_offered(self.server, self.likely["model"])

    def ask(
        self,
        images: Sequence[Image.Image],
        jobs: Sequence[Job],
        read: Read,
        *,
        written: bool = False,
    ) -> list[Any]:
        """Ask every question -> what each answer was read as, None where there is none.

        written: the whole answer is wanted, not the likeliest first tokens. Raises RunError once
        more than `max_failed` of the questions failed.
        """
        # equal questions about equal images have one key, and are asked once
        settings = self.written if written else self.likely
        encoded = [encode(image, self.encoding) for image in images]
        keys = [_key(settings, encoded, job) for job in jobs]
        asked = dict(zip(keys, jobs, strict=True))

        def question(key: str) -> JudgeQuestion:
            return _question(settings, encoded, asked[key])

        found = find_answers(
            self.server, self.cache, asked, lambda _, answer: read(answer), question
        )
        return [found.values.get(key) for key in keys]


def _key(settings: dict[str, Any], encoded: Sequence[EncodedImage], job: Job) -> str:
    asked = [settings, job.text, [encoded[i].digest for i in job.shown]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _question(settings: dict[str, Any], encoded: Sequence[EncodedImage], job: Job) -> JudgeQuestion:
    def body() -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for i in job.shown:
            content.append({"type": "image_url", "image_url": {"url": encoded[i].url}})
        content.append({"type": "text", "text": job.text})
        return {**settings, "messages": [{"role": "user", "content": content}]}

    return JudgeQuestion(job.name, body)


def wordings(own: Mapping[str, str], given: Mapping[str, str] | None, who: str) -> dict[str, str]:
    """Return the wordings by name, a config's where it gives some. Each must have the marks, such
    as {prompt}, that our own has, once each. Raises ConfigError."""
    unknown = sorted(set(given or {}) - set(own))
    if unknown:
        raise ConfigError(
            f"{who}: wordings: expected some of {', '.join(own)}, got {', '.join(unknown)}"
        )
    for name, text in (given or {}).items():
        for mark in marks(own[name]):
            if text.count(mark) != 1:
                raise ConfigError(
                    f"{who}: wordings.{name}: expected {mark} once, got {text.count(mark)} times"
                )
    return {**own, **(given or {})}


def marks(text: str) -> list[str]:
    """Return which places for texts a wording has."""
    return [mark for mark in ("{prompt}", "{criterion}", "{requirement}") if mark in text]


def fill(wording: str, **texts: str) -> str:
    """Put texts at their marks; what looks like a mark inside of a text stays as it is."""
    out, rest = "", wording
    places = {f"{{{name}}}": text for name, text in texts.items()}
    while rest:
        found = [(rest.find(mark), mark) for mark in places if mark in rest]
        if not found:
            break
        at, mark = min(found)
        out += rest[:at] + places[mark]
        rest = rest[at + len(mark) :]
    return out + rest
