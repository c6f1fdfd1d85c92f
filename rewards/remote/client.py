"""A reward that asks servers started by `flowrl serve-rewards`. What they do not answer properly is
never a score."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.types import RewardBatch
from flowrl.core.version import __version__

from .._common.http_client import (
    HttpClient,
    RequestFailed,
    exchange,
    for_each,
    read_secret,
    run,
    split_url,
    without_password,
)
from .endpoints import Endpoint, Endpoints, NoAnswer
from .messages import (
    LONGEST,
    Hosted,
    ServerFull,
    Told,
    check_kind,
    chunks_of,
    longest_answer,
    other_settings,
    pack,
    pack_records,
    read_fault,
    read_health,
    read_scores,
    read_told,
    refusal,
)

WHO = "rewards.remote"
CONNECT = 10.0  # seconds for a connection, and for the answer to a probe
RECORDS = 512  # in a request that has them checked
SAY_EVERY = 10.0  # seconds between messages while it waits
MODES = ("wait", "drop_group", "stop")
_log = logging.getLogger("flowrl.rewards.remote")


class remote:
    """Score images [L, 3, H, W], or videos [L, T, 3, H, W], in [0, 1] with a reward that other
    processes host -> [L] float32, in its own range.

    Images and frames are rounded to 8 bits and sent as PNG, scores come back as decimal numbers
    that name the same float32: the result equals the reward in this process to the bit, if that
    does not depend on how images are batched. Images of one prompt go in one request, so that
    rewards which compare them see them all; videos only if the hosted reward compares them.

    Args:
        urls: servers; the one with the fewest requests outstanding is asked next, one that fails
            rests.
        reward: the reward's name at the server; "" = the only one that it hosts.
        videos: the hosted reward judges videos.
        timeout: seconds for one request, from its first to its last byte; a server that is full
            is asked again for as long, as no try.
        retries: further tries of a request, at another server where there is one.
        backoff: seconds before the second try, doubled for each further one, up to 10.
        workers: requests under way at the same time.
        chunk: images or frames per request; more only where one prompt or video has more.
        token_env: environment variable with the servers' token; "" = none.
        on_failure: of a request, after its last try: "stop" raises, "drop_group" scores no image
            of the prompts that it held (NaN), "wait" tries on for up to `wait_s` seconds and then
            raises.
        settings: what the hosted reward has to be, such as ``{fn: shapes, mode: strict}``; keys
            that are not named may be anything. Servers that are asked in turn, and one that is
            started again, have to agree in all of them, whether this is given or not.

    Raises ConfigError for an argument, RewardError with address and reason, DataError for what
    cannot be judged.
    """

    def __init__(
        self,
        *,
        urls: list[str],
        reward: str = "",
        videos: bool = False,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        workers: int = 8,
        chunk: int = 32,
        token_env: str = "",
        on_failure: Literal["wait", "drop_group", "stop"] = "stop",
        wait_s: float = 600.0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        check("workers", workers >= 1, "at least 1", workers)
        check("chunk", chunk >= 1, "at least 1", chunk)
        check("retries", retries >= 0, "at least 0", retries)
        check_seconds(backoff=backoff, wait_s=wait_s, timeout=timeout)
        self.urls = check_urls(urls)
        check("on_failure", on_failure in MODES, f"one of {', '.join(MODES)}", on_failure)
        self.reward, self.timeout, self.retries, self.backoff = reward, timeout, retries, backoff
        self.workers, self.chunk, self.on_failure, self.wait_s = workers, chunk, on_failure, wait_s
        self.judges_videos, self._singly = videos, set[str]()  # servers that compare nothing
        self.settings, self._told = settings, dict[str, Told]()  # what each server said of itself
        # the client; no proxies: a reward server stands in the run's own network
        token = read_secret(token_env, f"{WHO}: token_env") if token_env else ""
        self._http = HttpClient(self.urls, secret=token, connections=workers, connect=CONNECT)
        self._endpoints = Endpoints(self.urls, rest=2 * backoff)
        self._said = -SAY_EVERY  # time.monotonic() of the last message

    @property
    def told(self) -> dict[str, Any]:
        """Return the settings of the hosted reward, as servers told them; {} where none did."""
        known = [said.settings for said in self._told.values() if said.settings]
        return dict(known[0]) if known else {}

    def probe(self) -> None:
        """Ask every server for the reward. Raises RewardError if none answers, ConfigError."""
        run(self._probe())

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Let the hosted reward refuse a record. Raises as `check_records` does."""
        self.check_records([record], [where])

    def check_records(self, records: Sequence[dict[str, Any]], places: Sequence[str]) -> None:
        """Let the hosted reward refuse records, before the first image is made. Raises DataError
        with its own message, and what `probe` raises."""
        run(self._check(records, places))

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image; NaN where the server's reward gave NaN, or a prompt was dropped."""
        # images of one prompt go in one request
        check_kind(batch, self.judges_videos)
        scores = torch.full((len(batch.prompts),), torch.nan)
        apart = self.judges_videos and self._singly >= set(self.urls)
        chunks = chunks_of(batch, self.chunk, apart=apart)
        answers = run(self._ask_all(batch, chunks))
        # scores, or why there are none
        lost: list[int] = []
        reasons: list[str] = []
        for rows, answer in zip(chunks, answers, strict=True):
            if isinstance(answer, Tensor):
                scores[rows] = answer
            else:
                lost += rows
                reasons.append(answer)
        # a prompt is dropped as a whole
        if lost:
            group = batch.group.cpu()
            gone = torch.isin(group, group[lost])
            scores[gone] = torch.nan
            dropped = int(gone.sum())
            _log.warning(
                "%s: %d of %d images are not scored: %s", WHO, dropped, len(gone), reasons[0]
            )
        return scores

    async def _ask_all(self, batch: RewardBatch, chunks: list[list[int]]) -> list[Tensor | str]:
        """Send all chunks, `workers` at a time -> the scores of each, or why there are none."""
        # in the order of the chunks, whichever answer comes first
        answers: list[Tensor | str] = [""] * len(chunks)

        async def ask(client: Any, number: int) -> None:
            """Keep the answer to a chunk, which a thread packs, so that others are heard."""
            rows = chunks[number]
            body = await asyncio.to_thread(pack, batch, rows, self.reward)
            try:
                answers[number] = await self._ask_until_answered(client, body, len(rows))
            except NoAnswer as error:
                if self.on_failure != "drop_group":
                    raise RewardError(f"{WHO}: no scores from {error}") from None
                answers[number] = str(error)

        # a few at a time, so that servers are not flooded
        async with self._http.open() as client:
            workers = min(self.workers, len(chunks))
            await for_each(range(len(chunks)), lambda n: ask(client, n), workers=workers)
        return answers

    async def _ask_until_answered(self, client: Any, body: bytes, count: int) -> Tensor:
        """Send one request until it is answered. Raises NoAnswer."""
        last: Endpoint | None = None
        began: float | None = None
        attempt, reason, patience = 0, "servers that rest", self.timeout
        while True:
            # ask the least busy server, or none while all rest
            endpoint = self._endpoints.take(avoid=last)
            if endpoint is not None:
                last = endpoint
                try:
                    scores = await self._ask_once(client, endpoint, body, count)
                except ServerFull as full:
                    scores = f"{endpoint.url}: {full}"
                    if patience > 0:
                        patience -= await self._wait_for_room(scores, full.seconds)
                        continue
                if isinstance(scores, Tensor):
                    return scores
                reason = scores
            else:
                reason = self._endpoints.reasons() or reason
            # time counts from the first failure
            began = time.monotonic() if began is None else began
            await self._pause(attempt, began, reason)
            attempt += 1

    async def _ask_once(
        self, client: Any, endpoint: Endpoint, body: bytes, count: int
    ) -> Tensor | str:
        """Ask one server -> scores [count], or its address and what is wrong with it. Raises
        ServerFull."""
        url = f"{endpoint.url}/score"
        try:
            data = await self._exchange(client, "POST", url, body, self.timeout, count)
            scores, told = read_scores(data, self.reward, count), read_told(data, self.reward)
            if told.settings is not None:  # it may have been started again, with another reward
                self._compare(endpoint.url, told)
        except ServerFull:  # it is well
            self._endpoints.give(endpoint)
            raise
        except RequestFailed as error:
            text = self._http.hide(str(error))
            self._endpoints.give_failed(endpoint, text)
            return f"{endpoint.url}: {text}"
        except BaseException:  # refused for good, or cancelled
            self._endpoints.give(endpoint)
            raise
        self._endpoints.give_answered(endpoint)
        return scores

    async def _exchange(
        self, client: Any, method: str, url: str, body: bytes, timeout: float, count: int
    ) -> bytes:
        """Return the answer to one request about `count` images.

        Raises RequestFailed where another try may help; DataError or RewardError for what the
        server refuses for good.
        """
        most = longest_answer(count)
        response = await exchange(client, method, url, body, timeout=timeout, most=most)
        if response.status != 200:
            said = self._http.hide_bytes(response.body)
            raise refusal(response.status, said, url, response.retry_after)
        return response.body

    async def _pause(self, attempt: int, began: float, reason: str) -> None:
        """Sleep before the next try. Raises NoAnswer if there is none."""
        # is there another try?
        waits = self.on_failure == "wait"
        left = began + self.wait_s - time.monotonic()
        if not waits and attempt >= self.retries:
            raise NoAnswer(f"{reason} (tried {attempt + 1} times)")
        if waits and left <= 0:
            raise NoAnswer(f"{reason} (waited {self.wait_s:g} s)")
        if waits:
            self._say("no scores from %s; trying on for up to %.0f s", reason, left)
        delay = max(min(LONGEST, self.backoff * 2 ** min(attempt, 16)), self._endpoints.soonest())
        await self._sleep(min(delay, left) if waits else delay, reason)

    async def _wait_for_room(self, reason: str, seconds: float) -> float:
        """Wait as a server that is full asks, at least `backoff` -> the seconds."""
        pause = max(seconds, self.backoff, 1e-3)
        self._say("%s; asking again after %.1f s", reason, pause)
        await self._sleep(pause, reason)
        return pause

    def _say(self, text: str, *values: object) -> None:
        """Warn of what holds the scores up, now and then."""
        if time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            _log.warning(f"%s: {text}", WHO, *values)

    async def _sleep(self, seconds: float, reason: str) -> None:
        """Sleep in short parts: the end of the program must not be held up. Raises NoAnswer
        then."""
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            await asyncio.sleep(min(rest, 1.0))
            try:
                await asyncio.to_thread(float)  # threads are refused once the program ends
            except RuntimeError:
                raise NoAnswer(f"{reason} (the program ends)") from None

    async def _check(self, records: Sequence[dict[str, Any]], places: Sequence[str]) -> None:
        """Show the records to the first server that is well."""
        await self._probe()
        async with self._http.open() as client:
            # all of them serve the same reward, so the answer of one is enough
            for url in self.urls:
                try:
                    hosted = await self._asked_health(client, url)
                    # in parts, so that no request is too long
                    for first in range(0, len(records) if hosted.checks else 0, RECORDS):
                        rows = slice(first, first + RECORDS)
                        body = pack_records(hosted.name, records[rows], places[rows])
                        to = f"{url}/check"
                        data = await self._exchange(client, "POST", to, body, self.timeout, 0)
                        fault = read_fault(data)
                        if fault is not None:
                            raise DataError(fault)
                except RequestFailed:  # it went down since; the next one may answer
                    continue
                return

    async def _probe(self) -> None:
        began, attempt = time.monotonic(), 0
        async with self._http.open() as client:
            # until one server is well
            while True:
                found = await asyncio.gather(*(self._health(client, url) for url in self.urls))
                faults = {url: fault for url, fault in zip(self.urls, found, strict=True) if fault}
                reason = "; ".join(f"{url}: {fault}" for url, fault in faults.items())
                if len(faults) < len(self.urls):
                    break
                try:
                    await self._pause(attempt, began, reason)
                except NoAnswer as error:
                    raise RewardError(
                        f"{WHO}: no server answers: {error}. Start one (`flowrl serve-rewards "
                        "CONFIG`), or correct urls"
                    ) from None
                attempt += 1
        # the others may come back
        if faults:
            _log.warning("%s: going on without %s", WHO, reason)

    async def _health(self, client: Any, url: str) -> str:
        """Ask one server -> "", or what is wrong with it."""
        try:
            await self._asked_health(client, url)
        except RequestFailed as error:
            return self._http.hide(str(error))
        return ""

    async def _asked_health(self, client: Any, url: str) -> Hosted:
        """Ask one server how it is. Raises RequestFailed."""
        seconds = min(self.timeout, CONNECT)
        answer = await self._exchange(client, "GET", f"{url}/health", b"", seconds, 0)
        hosted = read_health(answer, url, self.reward, self.chunk, self.judges_videos)
        (self._singly.add if hosted.singly else self._singly.discard)(url)
        self._compare(url, read_told(answer, hosted.name))
        return hosted

    def _compare(self, url: str, told: Told) -> None:
        """Compare what a server says of itself with what is wanted, and with what all said before.
        Raises ConfigError that says what differs."""
        # another version may score otherwise: it is said, once
        known = self._told.get(url)
        if told.version not in ("", __version__) and (
            known is None or known.version != told.version
        ):
            text = "%s: %s runs flowrl %s, here it is %s; scores may differ"
            _log.warning(text, WHO, url, told.version, __version__)
        # other settings are another reward
        if self.settings is not None:
            wrong = other_settings(self.settings, told.settings or {}, self.settings)
            check_same(f"settings: expected here and told by {url}", wrong)
        for other, said in self._told.items():
            if told.settings is not None and said.settings is not None:
                keys = dict.fromkeys([*said.settings, *told.settings])
                wrong = other_settings(said.settings, told.settings, keys)
                one = f"{url} before and now" if other == url else f"{other} and {url}"
                check_same(f"urls: {one} serve different rewards", wrong)
        self._told[url] = told


def check_same(what: str, wrong: list[str]) -> None:
    """Raise ConfigError where something differs."""
    if wrong:
        raise ConfigError(f"{WHO}: {what}: {'; '.join(wrong)}")


def check_url(url: str) -> str:
    """Return the address without a slash at its end. Raises ConfigError, without showing a password
    in it."""
    parts = split_url(url)
    if parts is None or parts.username is not None:
        raise ConfigError(
            f"{WHO}: urls: expected addresses like http://10.0.0.5:8321, got "
            f"{without_password(url)!r}; no user names, passwords or queries: a token goes into an "
            "environment variable that token_env names"
        )
    return url.rstrip("/")


def check_urls(urls: list[str]) -> list[str]:
    """Return the addresses as `check_url` does. Raises ConfigError for none, or one twice."""
    checked = [check_url(url) for url in urls]
    fine = 0 < len(set(checked)) == len(urls)
    check("urls", fine, "one address or more, each once", urls)
    return checked


def check_seconds(**seconds: float) -> None:
    """Raise ConfigError for a time below 0, or a timeout of 0."""
    for name, value in seconds.items():
        zero = name != "timeout"
        text = f"a number of seconds {'>=' if zero else '>'} 0"
        check(name, value > 0 or (zero and value == 0), text, value)


def check(name: str, fine: bool, expected: str, got: Any) -> None:
    """Raise ConfigError unless an argument is fine."""
    if not fine:
        raise ConfigError(f"{WHO}: {name}: expected {expected}, got {got!r}")
