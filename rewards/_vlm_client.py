"""Ask an OpenAI-compatible server many questions at once: bounded concurrency, retries, answers kept on disk."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from flowrl.errors import ConfigError, RunError
from rewards._vlm_answers import Answer

WHO = "rewards.vlm"
LONGEST_PAUSE = 60.0  # seconds between two tries, whatever the server asks for
_JITTER = random.SystemRandom()  # leaves the run's own random numbers alone
_T = TypeVar("_T")


class Server(NamedTuple):
    """Where the judge is and how patiently it is asked."""

    base: str  # ends with /v1
    key_env: str | None
    timeout: float
    retries: int
    backoff: float
    workers: int
    max_failed: float


class Question(NamedTuple):
    """One question: how messages call it, and the request, built only when its turn comes."""

    name: str
    body: Callable[[], dict[str, Any]]


class Reply(NamedTuple):
    """What came of one try."""

    answer: Answer | None
    fault: str = ""
    again: bool = True  # whether another try may help
    fatal: bool = False  # whether every other question would fail likewise
    pause: float = 0.0  # seconds that the server asked for


def base_url(url: str) -> str:
    """Return the address that ends with /v1. Raises ConfigError for another scheme, or a password in the address."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ConfigError(f"{WHO}: url: expected one like http://localhost:8080, got {url.rpartition('@')[2]!r}")
    if parts.username is not None:
        raise ConfigError(f"{WHO}: url: expected no user name or password in it; name a variable in api_key_env")
    plain = url.rstrip("/")
    return plain if plain.endswith("/v1") else f"{plain}/v1"


def api_key(server: Server) -> str:
    """Return the key from the environment, "" if none is configured. Raises ConfigError without showing the key."""
    if server.key_env is None:
        return ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", server.key_env):  # perhaps the key itself, so it is not shown
        raise ConfigError(f"{WHO}: api_key_env: expected the name of an environment variable, got something else")
    key = os.environ.get(server.key_env, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{WHO}: api_key_env: {server.key_env} is not set in the environment, or holds no ASCII text")
    return key


def list_models(server: Server) -> list[str]:
    """Return the names of the models that the server offers. Raises RunError saying why it does not answer."""
    import httpx2

    async def get() -> list[str]:
        async with _client(server) as client, asyncio.timeout(min(server.timeout, 10.0)):
            response = await client.get(f"{server.base}/models")
        if response.status_code != 200:
            raise RunError(f"{WHO}: {server.base}/models answered {_status(server, response)}")
        try:
            return [str(model["id"]) for model in json.loads(response.content)["data"]]
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{WHO}: {server.base}/models: expected a list of models, got something else") from None

    try:
        return run(get())
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        fault = _hide(server, _name(error))
        raise RunError(f"{WHO}: no answer from {server.base}: {fault}. Is the server up, and `url` right?") from None


def ask_all(
    server: Server, questions: Mapping[str, Question], accept: Callable[[str, Answer], str], total: int
) -> dict[str, str]:
    """Send every question, at most `workers` at a time -> {key of a failed question: what went wrong}.

    `accept(key, answer)` takes each answer as it comes and returns "", or what is wrong with it. A try that fails in
    passing (429, 5xx, time-out, broken connection, torn JSON) is repeated with growing pauses. Raises RunError as soon
    as more than the share `max_failed` of `total` questions failed, or one meets a refusal that all would meet.
    """
    failed: dict[str, str] = {}

    async def work(client: Any, todo: Iterator[tuple[str, Question]]) -> None:
        for key, question in todo:
            fault = await _insist(server, client, question.body(), functools.partial(accept, key))
            if fault:
                failed[key] = f"{question.name}: {fault}"
            if len(failed) > server.max_failed * total + 1e-9:
                raise RunError(
                    f"{WHO}: expected answers to at least {1 - server.max_failed:.0%} of {total} questions; "
                    f"{len(failed)} failed so far, the first: {next(iter(failed.values()))}"
                )

    async def everything() -> None:
        todo = iter(questions.items())
        async with _client(server) as client:
            tasks = [asyncio.create_task(work(client, todo)) for _ in range(min(server.workers, len(questions)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    run(everything())
    return failed


async def _insist(server: Server, client: Any, body: dict[str, Any], accept: Callable[[Answer], str]) -> str:
    for attempt in range(server.retries + 1):
        reply = await _try(server, client, body)
        if reply.answer is not None:
            return accept(reply.answer)
        if reply.fatal:
            raise RunError(f"{WHO}: {server.base} refuses: {reply.fault}. Check `url`, `model` and `api_key_env`")
        if not reply.again or attempt == server.retries:
            return f"{reply.fault} (tried {attempt + 1} times)"
        wait = max(server.backoff * 2 ** min(attempt, 16), reply.pause) * _JITTER.uniform(1, 1.25)
        await asyncio.sleep(min(wait, LONGEST_PAUSE))
    raise AssertionError("unreachable")


async def _try(server: Server, client: Any, body: dict[str, Any]) -> Reply:
    import httpx2

    try:
        async with asyncio.timeout(server.timeout):  # of the whole exchange; the client's own is between two bytes
            response = await client.post(f"{server.base}/chat/completions", json=body)
    except (TimeoutError, httpx2.TimeoutException):
        return Reply(None, f"no answer within {server.timeout:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return Reply(None, _hide(server, _name(error)))
    code = response.status_code
    if code == 200:
        answer = _answer(response.content)
        if answer is None:
            return Reply(None, f"expected a chat completion, got {_start(server, response)}")
        return Reply(answer._replace(text=_hide(server, answer.text)))  # it is quoted where it cannot be read, and kept
    again = code in (408, 425, 429) or code >= 500
    pause = _pause(response.headers.get("retry-after"))
    return Reply(None, _status(server, response), again, code in (401, 403, 404), pause)


def _answer(content: bytes) -> Answer | None:
    try:
        choice = json.loads(content)["choices"][0]
        text = choice["message"]["content"] or ""
        rows = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
        top = [(str(row["token"]), float(row["logprob"])) for row in rows]
        cut = choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return Answer(text, [row for row in top if math.isfinite(row[1])], cut) if isinstance(text, str) else None


def _client(server: Server) -> Any:
    import httpx2

    key = api_key(server)
    local = urlsplit(server.base).hostname in ("localhost", "127.0.0.1", "::1")
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=server.timeout,
        limits=httpx2.Limits(max_connections=server.workers),
        trust_env=not local,  # a proxy cannot reach this machine's own ports
        verify=not (local and server.base.startswith("http:")),  # certificates take 0.1 s to load
    )


def _status(server: Server, response: Any) -> str:
    return f"HTTP {response.status_code}: {_start(server, response)}"


def _start(server: Server, response: Any) -> str:
    return repr(_hide(server, response.text)[:200])  # hidden first: a key cut in two would not be found


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _pause(header: str | None) -> float:
    try:
        seconds = float(header or 0)
    except ValueError:  # a date, which servers of models do not send
        return 0.0
    return min(seconds, LONGEST_PAUSE) if seconds > 0 else 0.0


def _hide(server: Server, text: str) -> str:
    key = api_key(server)
    return text.replace(key, "***") if key else text


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
        nested = True
    except RuntimeError:
        nested = False
    if not nested:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
