"""Ask an OpenAI-compatible server many questions at once: its options, the fixed part of a request,
bounded concurrency, and retries with growing pauses."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flowrl.core.errors import ConfigError, RunError

from .._common.http_client import (
    LOOPBACK,
    HttpClient,
    RequestFailed,
    Response,
    asked_pause,
    exchange,
    for_each,
    read_secret,
    run,
    split_url,
    without_password,
)
from .answer import Answer

WHO = "rewards.vlm"
LONGEST_PAUSE = 60.0  # seconds between two tries, whatever the server asks for
LONGEST_ANSWER = 2**24  # bytes; 4096 tokens with 20 log-probs each take half of it
PROBE_SECONDS = 10.0  # for the list of models
MOST_LOG_PROB = 0.1  # of a token: what is above 0 by more than rounding is no log-prob
_JITTER = random.SystemRandom()  # leaves the run's own random numbers alone
_OWN = {"model", "messages", "temperature", "logprobs", "top_logprobs", "max_tokens", "stream"}


class Server(NamedTuple):
    """Where the judge is and how patiently it is asked."""

    base: str  # ends with /v1
    key_env: str | None
    timeout: float
    retries: int
    backoff: float
    workers: int
    max_failed: float
    who: str = WHO  # which reward asks, for messages


class JudgeQuestion(NamedTuple):
    """One question: how messages call it, and the request, built only when its turn comes."""

    name: str
    body: Callable[[], dict[str, Any]]


class Failure(NamedTuple):
    """Why one try gave no answer."""

    text: str
    again: bool = True  # whether another try may help
    fatal: bool = False  # whether every other question would fail likewise
    pause: float = 0.0  # seconds that the server asked for


def base_url(url: str, who: str = WHO) -> str:
    """Return the address that ends with /v1. Raises ConfigError for another scheme, or a password
    in the address."""
    parts = split_url(url)
    if parts is None:
        raise ConfigError(
            f"{who}: url: expected one like http://localhost:8080, got {without_password(url)!r}"
        )
    if parts.username is not None:
        raise ConfigError(
            f"{who}: url: expected no user name or password in it; name a variable in api_key_env"
        )
    plain = url.rstrip("/")
    return plain if plain.endswith("/v1") else f"{plain}/v1"


def api_key(server: Server) -> str:
    """Return the key from the environment, "" if none is configured. Raises ConfigError without
    showing the key."""
    return (
        read_secret(server.key_env, f"{server.who}: api_key_env")
        if server.key_env is not None
        else ""
    )


def list_models(server: Server) -> list[str]:
    """Return the names of the models that the server offers. Raises RunError saying why it does not
    answer."""
    http = _http(server)
    url = f"{server.base}/models"

    # a short limit: this is asked before a run starts
    async def ask() -> Response:
        """Ask once, for no longer than a probe may take."""
        async with http.open() as client:
            seconds = min(server.timeout, PROBE_SECONDS)
            return await exchange(client, "GET", url, timeout=seconds, most=LONGEST_ANSWER)

    # no address, no answer, or the answer of another server: each has its own mend
    try:
        response = run(ask())
    except RequestFailed as error:
        fault = http.hide(str(error))
        raise RunError(
            f"{server.who}: no answer from {server.base}: {fault}. Is the server up, and `url` "
            "right?"
        ) from None
    if response.status != 200:
        raise RunError(f"{server.who}: {url} answered {_status(http, response)}")
    try:
        return [str(model["id"]) for model in json.loads(response.body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RunError(
            f"{server.who}: {url}: expected a list of models, got something else"
        ) from None


def check_offered(server: Server, model: str) -> None:
    """Raise RunError if the server does not answer, or does not offer the model."""
    offered = list_models(server)
    if model not in offered:
        raise RunError(
            f"{server.who}: {server.base} offers no model {model!r}, only "
            f"{', '.join(offered) or 'none'}"
        )


def ask_all(
    server: Server,
    questions: Mapping[str, JudgeQuestion],
    accept: Callable[[str, Answer], str],
    total: int,
) -> dict[str, str]:
    """Send every question, at most `workers` at a time -> {key of a failed question: what went
    wrong}.

    `accept(key, answer)` takes each answer as it comes and returns "", or what is wrong with it. A
    try that fails in passing (429, 5xx, time-out, broken connection, torn JSON) is repeated with
    growing pauses. Raises RunError as soon as more than the share `max_failed` of `total` questions
    failed, or one meets a refusal that all would meet.
    """
    http = _http(server)
    failed: dict[str, str] = {}

    # the share is looked at after each failure, so that a dead server is not asked to the end
    async def ask(client: Any, job: tuple[str, JudgeQuestion]) -> None:
        """Ask one question and note what went wrong; raise RunError once too much did."""
        key, question = job
        answer = await _ask_until_answered(server, http, client, question.body())
        fault = answer if isinstance(answer, str) else accept(key, answer)
        if fault:
            failed[key] = f"{question.name}: {fault}"
        if len(failed) > server.max_failed * total + 1e-9:
            first = next(iter(failed.values()))
            raise RunError(
                f"{server.who}: expected answers to at least {1 - server.max_failed:.0%} of "
                f"{total} questions; {len(failed)} failed so far, the first: {first}"
            )

    async def ask_each() -> None:
        workers = min(server.workers, len(questions))
        async with http.open() as client:
            await for_each(questions.items(), lambda job: ask(client, job), workers=workers)

    run(ask_each())
    return failed


async def _ask_until_answered(
    server: Server, http: HttpClient, client: Any, body: dict[str, Any]
) -> Answer | str:
    """Ask one question, again where that may help -> the answer, or why there is none."""
    for attempt in range(server.retries + 1):
        answer = await _ask_once(server, http, client, body)
        if isinstance(answer, Answer):
            return answer
        if answer.fatal:
            raise RunError(
                f"{server.who}: {server.base} refuses: {answer.text}. Check `url`, `model` and "
                "`api_key_env`"
            )
        if not answer.again or attempt == server.retries:
            return f"{answer.text} (tried {attempt + 1} times)"
        wait = max(server.backoff * 2 ** min(attempt, 16), answer.pause) * _JITTER.uniform(1, 1.25)
        await asyncio.sleep(min(wait, LONGEST_PAUSE))
    raise AssertionError("unreachable")


async def _ask_once(
    server: Server, http: HttpClient, client: Any, body: dict[str, Any]
) -> Answer | Failure:
    # the request
    url, data = f"{server.base}/chat/completions", json.dumps(body, allow_nan=False).encode()
    try:
        limits: dict[str, Any] = {"timeout": server.timeout, "most": LONGEST_ANSWER}
        response = await exchange(client, "POST", url, data, **limits)
    except RequestFailed as error:
        return Failure(http.hide(str(error)))
    # a refusal
    code = response.status
    if code != 200:
        again = code in (408, 425, 429) or code >= 500
        fatal = code in (401, 403, 404)
        return Failure(
            _status(http, response), again, fatal, asked_pause(response.retry_after, LONGEST_PAUSE)
        )
    # an answer; its text is quoted where it cannot be read, and kept
    answer = _parse(response.body)
    if answer is None:
        return Failure(f"expected a chat completion, got {_start(http, response)}")
    return answer._replace(text=http.hide(answer.text))  # a failure's words, too


def _parse(content: bytes) -> Answer | Failure | None:
    """Read a chat completion; a failure if its log-probs are none, None if it is none itself."""
    try:
        choice = json.loads(content)["choices"][0]
        text = choice["message"]["content"] or ""
        rows = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or []
        top = [(str(row["token"]), float(row["logprob"])) for row in rows]
        cut = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    if not isinstance(text, str):
        return None
    for token, lp in top:
        if lp > MOST_LOG_PROB:
            said = f"expected log-probs of at most 0, got {lp:g} for the token {token!r}"
            return Failure(said, again=False)
    return Answer(text, [row for row in top if math.isfinite(row[1])], cut)


def _http(server: Server) -> HttpClient:
    # a proxy cannot reach this machine's own ports
    remote = urlsplit(server.base).hostname not in LOOPBACK
    key = api_key(server)
    return HttpClient([server.base], secret=key, connections=server.workers, proxies=remote)


def _status(http: HttpClient, response: Response) -> str:
    return f"HTTP {response.status}: {_start(http, response)}"


def _start(http: HttpClient, response: Response) -> str:
    # hidden first: a key cut in two would not be found
    return repr(http.hide(response.body.decode("utf-8", "replace"))[:200])


def request_settings(
    model: str,
    log_probs: bool,
    max_tokens: int | None,
    extra: dict[str, Any] | None,
    who: str = WHO,
) -> dict[str, Any]:
    """Return the request without its message; with `log_probs` for the likeliest first tokens."""
    taken = sorted(_OWN & set(extra or {}))
    if taken:
        raise ConfigError(f"{who}: extra: {', '.join(taken)} cannot be given here: flowrl sets it")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"{who}: max_tokens: expected 1 or more, got {max_tokens}")
    likely = {"logprobs": True, "top_logprobs": 20} if log_probs else {}
    most = max_tokens or (1 if likely else 4096)
    # Without a temperature, servers take the model's own default, which samples.
    return {**(extra or {}), "model": model, "temperature": 0, "max_tokens": most, **likely}


def check_server(server: Server) -> Server:
    """Return the options; raises ConfigError for one that is wrong, or a key that is not there."""
    wrong = [
        f"{name}: expected {expected}, got {getattr(server, name)}"
        for name, expected, right in [
            ("timeout", "seconds > 0", server.timeout > 0),
            ("retries", "0 or more", server.retries >= 0),
            ("backoff", "seconds >= 0", server.backoff >= 0),
            ("workers", "1 or more", server.workers >= 1),
            ("max_failed", "a share from 0 to 1", 0 <= server.max_failed <= 1),
        ]
        if not right
    ]
    if wrong:
        raise ConfigError(f"{server.who}: {wrong[0]}")
    api_key(server)  # a missing key is found now, not after the first images
    return server
