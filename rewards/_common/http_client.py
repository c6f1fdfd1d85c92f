"""The HTTP client of the rewards that ask a server: one exchange, many at once, and secrets that no
message shows."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from flowrl.core.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_T = TypeVar("_T")


class RequestFailed(Exception):
    """A request that another try may answer; the text says why."""


class Response(NamedTuple):
    """What a server answered."""

    status: int
    body: bytes
    retry_after: str | None  # the header, as it came


def split_url(url: str) -> SplitResult | None:
    """Return the parts of an address, or None if a reward cannot ask it: another scheme than http
    or https, no host, a wrong port, a query or a fragment."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return None
    good = good and parts.scheme in ("http", "https")
    return parts if good and not parts.query and not parts.fragment else None


def asked_pause(header: str | None, most: float) -> float:
    """Return the seconds, at most so many, that a Retry-After header asks for; 0 without one."""
    try:
        seconds = float(header or 0)
    except ValueError:  # a date, which servers of models do not send
        return 0.0
    return min(seconds, most) if seconds > 0 else 0.0


def without_password(url: str) -> str:
    """Return an address for a message: what stands before an @ may be a password."""
    return url.rpartition("@")[2]


PREFIXES = ("FLOWRL_", "REWARD_", "JUDGE_")  # of variables that a config may name as a secret
ALLOWED = "FLOWRL_SECRETS"  # a variable that lists others, set by who starts the run


def read_secret(variable: str, option: str) -> str:
    """Return the secret in an environment variable. Raises ConfigError, which never shows it.

    A config may come from a stranger, and it also names the server that the secret is sent to. So
    it may name variables that are meant for this, and others only where FLOWRL_SECRETS lists them.

    option: how messages call the argument that names the variable. The name itself is shown only
    if it can be one: users put the secret there by mistake.
    """
    # users paste the secret itself here: what cannot be a name is not shown
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise ConfigError(
            f"{option}: expected the name of an environment variable, got something else"
        )
    allowed = os.environ.get(ALLOWED, "").replace(",", " ").split()
    if not variable.startswith(PREFIXES) and variable not in allowed:
        raise ConfigError(
            f"{option}: expected the name of a variable that begins with {', '.join(PREFIXES)}; "
            "a config must not be able to send any secret anywhere. If you trust this one, name "
            f"the variable in {ALLOWED}"
        )
    # a header takes printable ASCII alone; say so here, where the value stays hidden
    value = os.environ.get(variable, "").strip()
    if not value or not value.isascii() or not value.isprintable():
        raise ConfigError(
            f"{option}: expected printable ASCII in the environment variable {variable}; it is "
            + ("something else" if value else "unset or empty")
        )
    return value


class HttpClient:
    """How some servers are asked: with which secret, over how many connections.

    connect: seconds for a connection; None = only the limit of the whole exchange. proxies: use
    those of the environment. Certificates are read once, and only for https: that takes longer
    than many a request.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        secret: str,
        connections: int,
        connect: float | None = None,
        proxies: bool = False,
    ) -> None:
        self._secret, self._connections = secret, connections
        self._connect, self._proxies = connect, proxies
        self._secure = proxies or any(url.startswith("https:") for url in urls)
        self._tls: ssl.SSLContext | None = None

    def hide(self, text: str) -> str:
        """Replace the secret in a text that may end in a log."""
        return text.replace(self._secret, "***") if self._secret else text

    def hide_bytes(self, data: bytes) -> bytes:
        """Replace the secret in a body that may end in a log."""
        return data.replace(self._secret.encode(), b"***") if self._secret else data

    def open(self) -> AbstractAsyncContextManager[Any]:
        """Return a client to pass to `exchange`; its connections are closed with it."""
        import httpx2

        if self._tls is None:
            empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls = httpx2.create_ssl_context() if self._secure else empty
        client: AbstractAsyncContextManager[Any] = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {self._secret}"} if self._secret else {},
            # `exchange` limits the whole request; the client's own limits are between two bytes
            timeout=httpx2.Timeout(None, connect=self._connect),
            limits=httpx2.Limits(max_connections=self._connections),
            verify=self._tls,
            trust_env=self._proxies,
        )
        return client


async def exchange(
    client: Any,
    method: str,
    url: str,
    body: bytes = b"",
    *,
    timeout: float,
    most: int,
) -> Response:
    """Send a request with a JSON body and read the answer, all of it within `timeout` seconds.

    most: bytes of the longest answer that is read; it is asked for uncompressed. Raises
    RequestFailed where no whole answer came.
    """
    import httpx2

    # a compressed answer could unpack to any size
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    # the answer, part by part
    parts = bytearray()
    try:
        async with (
            asyncio.timeout(timeout),
            client.stream(method, url, content=body, headers=headers) as response,
        ):
            coding = response.headers.get("content-encoding", "identity").strip().lower()
            if coding not in ("", "identity"):
                raise RequestFailed(f"expected an answer that is not compressed, got {coding!r}")
            async for part in response.aiter_raw():
                parts += part
                if len(parts) > most:
                    raise RequestFailed(f"an answer of more than {most} bytes")
    except TimeoutError:
        raise RequestFailed(f"no answer within {timeout:g} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from None
    return Response(response.status_code, bytes(parts), response.headers.get("retry-after"))


async def for_each(
    jobs: Iterable[_T], work: Callable[[_T], Awaitable[None]], *, workers: int
) -> None:
    """Do all jobs, at most `workers` at a time. The first error ends the others and is raised."""
    todo = iter(jobs)

    async def worker() -> None:
        for job in todo:
            await work(job)

    tasks = [asyncio.create_task(worker()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
