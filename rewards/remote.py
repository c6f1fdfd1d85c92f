"""A reward that asks servers started by `flowrl serve-rewards`. What they do not answer properly is never a score."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import ConfigError, RewardError
from flowrl.types import RewardBatch
from rewards._endpoints import LONGEST, Endpoint, Endpoints
from rewards._remote_wire import (
    Failed,
    Unanswered,
    check_url,
    chunks_of,
    exchange,
    pack,
    read_health,
    read_scores,
    token,
)
from rewards._vlm_client import run

WHO = "rewards.remote"
CONNECT = 10.0  # seconds for a connection, and for the answer to a probe
SAY_EVERY = 10.0  # seconds between messages while it waits
MODES = ("wait", "drop_group", "stop")
_log = logging.getLogger("flowrl.rewards.remote")


class remote:  # noqa: N801 - configs name rewards in lower case
    """Score pictures [L, 3, H, W] in [0, 1] with a reward that other processes host -> [L] float32, in its own range.

    Pictures are rounded to 8 bits and sent as PNG, scores come back as decimal numbers that name the same float32: the
    result equals the reward in this process to the bit, if that does not depend on how pictures are batched. Pictures
    of one prompt go in one request, so that rewards which compare them see them all.

    Args:
        urls: servers; the one with the fewest requests outstanding is asked next, one that fails rests.
        reward: the reward's name at the server; "" = the only one that it hosts.
        timeout: seconds for one request, from its first to its last byte.
        retries: further tries of a request, at another server where there is one.
        backoff: seconds before the second try, doubled for each further one, up to 10.
        workers: requests under way at the same time.
        chunk: pictures per request; more only where one prompt has more.
        token_env: environment variable with the servers' token; "" = none.
        on_failure: of a request, after its last try: "stop" raises, "drop_group" scores no picture of the prompts that
            it held (NaN), "wait" tries on for up to `wait_s` seconds and then raises.
    Raises ConfigError for an argument, RewardError with address and reason, DataError for what cannot be judged.
    """

    def __init__(
        self,
        *,
        urls: list[str],
        reward: str = "",
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 0.5,
        workers: int = 8,
        chunk: int = 32,
        token_env: str = "",
        on_failure: Literal["wait", "drop_group", "stop"] = "stop",
        wait_s: float = 600.0,
    ) -> None:
        for name, value, low in (("workers", workers, 1), ("chunk", chunk, 1), ("retries", retries, 0)):
            _check(name, value >= low, f"at least {low}", value)
        for name, seconds in (("backoff", backoff), ("wait_s", wait_s)):
            _check(name, seconds >= 0, "a number of seconds >= 0", seconds)
        _check("timeout", timeout > 0, "a number of seconds > 0", timeout)
        self.urls = [check_url(url) for url in urls]
        _check("urls", 0 < len(set(self.urls)) == len(urls), "one address or more, each once", urls)
        _check("on_failure", on_failure in MODES, f"one of {', '.join(MODES)}", on_failure)
        self.reward, self.timeout, self.retries, self.backoff = reward, timeout, retries, backoff
        self.workers, self.chunk, self.on_failure, self.wait_s = workers, chunk, on_failure, wait_s
        self._token = token(token_env)
        self._endpoints = Endpoints(self.urls, rest=2 * backoff)
        self._tls: ssl.SSLContext | None = None
        self._said = -SAY_EVERY  # time.monotonic() of the last message

    def probe(self) -> None:
        """Ask every server whether it hosts the reward. Raises RewardError if none answers, ConfigError if not."""
        run(self._probe())

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each picture; NaN where the server's reward gave NaN, or a prompt was dropped."""
        chunks, scores = chunks_of(batch, self.chunk), torch.full((len(batch.prompts),), torch.nan)
        answers = run(self._all(batch, chunks))
        lost = [row for rows, answer in zip(chunks, answers, strict=True) if isinstance(answer, str) for row in rows]
        for rows, answer in zip(chunks, answers, strict=True):
            if isinstance(answer, Tensor):
                scores[rows] = answer
        if lost:
            group = batch.group.cpu()
            gone = torch.isin(group, group[lost])
            scores[gone] = torch.nan
            reason = next(answer for answer in answers if isinstance(answer, str))
            _log.warning("%s: %d of %d pictures are not scored: %s", WHO, int(gone.sum()), len(gone), reason)
        return scores

    async def _all(self, batch: RewardBatch, chunks: list[list[int]]) -> list[Tensor | str]:
        """Send all chunks, `workers` at a time -> the scores of each, or why there are none."""
        answers: list[Tensor | str] = [""] * len(chunks)
        todo = iter(enumerate(chunks))

        async def work() -> None:
            for number, rows in todo:
                body = await asyncio.to_thread(pack, batch, rows, self.reward)
                try:
                    answers[number] = await self._insist(client, body, len(rows))
                except Unanswered as error:
                    if self.on_failure != "drop_group":
                        raise RewardError(f"{WHO}: no scores from {error}") from None
                    answers[number] = str(error)

        async with self._client() as client:
            tasks = [asyncio.create_task(work()) for _ in range(min(self.workers, len(chunks)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def _insist(self, client: Any, body: bytes, count: int) -> Tensor:
        """Send one request until it is answered. Raises Unanswered."""
        last: Endpoint | None = None
        began: float | None = None
        attempt, reason = 0, "servers that rest"
        while True:
            endpoint = self._endpoints.take(avoid=last)
            if endpoint is not None:
                last = endpoint
                scores = await self._try(client, endpoint, body, count)
                if isinstance(scores, Tensor):
                    return scores
                reason = scores
            else:
                reason = self._endpoints.reasons() or reason
            began = time.monotonic() if began is None else began
            await self._pause(attempt, began, reason)
            attempt += 1

    async def _try(self, client: Any, endpoint: Endpoint, body: bytes, count: int) -> Tensor | str:
        """Ask one server -> scores [count], or its address and what is wrong with it."""
        try:
            data = await exchange(client, "POST", f"{endpoint.url}/score", body, self.timeout, count)
            scores = read_scores(data, self.reward, count)
        except Failed as error:
            text = self._hide(str(error))
            self._endpoints.give_failed(endpoint, text)
            return f"{endpoint.url}: {text}"
        except BaseException:  # refused for good, or cancelled
            self._endpoints.give(endpoint)
            raise
        self._endpoints.give_answered(endpoint)
        return scores

    async def _pause(self, attempt: int, began: float, reason: str) -> None:
        """Sleep before the next try. Raises Unanswered if there is none."""
        left = began + self.wait_s - time.monotonic()
        if self.on_failure != "wait" and attempt >= self.retries:
            raise Unanswered(f"{reason} (tried {attempt + 1} times)")
        if self.on_failure == "wait":
            if left <= 0:
                raise Unanswered(f"{reason} (waited {self.wait_s:g} s)")
            if time.monotonic() - self._said >= SAY_EVERY:
                self._said = time.monotonic()
                _log.warning("%s: no scores from %s; trying on for up to %.0f s", WHO, reason, left)
        delay = max(min(LONGEST, self.backoff * 2 ** min(attempt, 16)), self._endpoints.soonest())
        end = time.monotonic() + (min(delay, left) if self.on_failure == "wait" else delay)
        while (rest := end - time.monotonic()) > 0:
            await asyncio.sleep(min(rest, 1.0))
            try:
                await asyncio.to_thread(float)  # refused once the program ends, which this must not hold up
            except RuntimeError:
                raise Unanswered(f"{reason} (the program ends)") from None

    async def _probe(self) -> None:
        began, attempt = time.monotonic(), 0
        async with self._client() as client:
            while True:
                found = await asyncio.gather(*(self._health(client, url) for url in self.urls))
                faults = {url: fault for url, fault in zip(self.urls, found, strict=True) if fault}
                reason = "; ".join(f"{url}: {fault}" for url, fault in faults.items())
                if len(faults) < len(self.urls):
                    break
                try:
                    await self._pause(attempt, began, reason)
                except Unanswered as error:
                    raise RewardError(
                        f"{WHO}: no server answers: {error}. Start one (`flowrl serve-rewards CONFIG`), or correct urls"
                    ) from None
                attempt += 1
        if faults:
            _log.warning("%s: going on without %s", WHO, reason)

    async def _health(self, client: Any, url: str) -> str:
        """Ask one server -> "", or what is wrong with it."""
        try:
            answer = await exchange(client, "GET", f"{url}/health", b"", min(self.timeout, CONNECT), 0)
            read_health(answer, url, self.reward, self.chunk)
        except Failed as error:
            return self._hide(str(error))
        return ""

    def _hide(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text

    def _client(self) -> Any:
        """Return an HTTP client for one call; what it held is closed with it."""
        import httpx2

        if self._tls is None:  # reading the certificates takes longer than many a request, so once and where needed
            secure = any(url.startswith("https:") for url in self.urls)
            self._tls = httpx2.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
            # asyncio.timeout limits the whole exchange; the client's own limits are between two bytes
            timeout=httpx2.Timeout(None, connect=CONNECT),
            limits=httpx2.Limits(max_connections=self.workers),
            verify=self._tls,
            trust_env=False,  # no proxy: a reward server stands in the run's own network
        )


def _check(name: str, fine: bool, expected: str, got: Any) -> None:
    if not fine:
        raise ConfigError(f"{WHO}: {name}: expected {expected}, got {got!r}")
