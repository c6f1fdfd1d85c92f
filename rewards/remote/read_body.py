"""Read a request's body, from clients that may be slow, send too much, or stop half-way; the places
for requests that are in work or held whole, and who gives one up while others wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from .read_request import RequestRefused

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_SECONDS = 120.0  # for a client to send its images
STALL_SECONDS = 10.0  # without a byte; of one that holds a place, without STEADY_BYTES more
SMALL_BYTES = 2**16  # what a body may hold before it has a place; half-sent ones mostly stay below
STEADY_BYTES = 2**16  # what a body that holds a place brings in every STALL_SECONDS
HURRY_SECONDS = 1.0  # while others wait for a place, a body that holds one has to bring
HURRY_BYTES = 2**16 // 10  # so much more in each of these
LOOK_SECONDS = 0.1  # between two looks at who is too slow


async def read_body(
    request: Request, limit: int, places: Places, held: AsyncExitStack
) -> bytearray:
    """Read a body of at most `limit` bytes; from then on `held` has a place.

    A place is awaited once the body is longer than SMALL_BYTES, or at its end. So clients that
    send half a body keep nobody waiting, and what many bodies hold together stays bounded. The
    wait for a place counts neither as a pause nor as time of the client. With a place a byte now
    and then is a pause, too: else a few that drip would hold every place. While others wait for
    one, slow bodies give theirs up sooner (`Places`).

    What is a little longer than `limit` is read to its end, so that its sender listens.

    Raises RequestRefused: too long, too slow, or the client has gone.
    """
    from starlette.requests import ClientDisconnect

    # what is said to be far too long is not read at all
    declared = request.headers.get("content-length", "0")[:20]
    known = declared.isascii() and declared.isdigit()  # "²" is a digit, too
    body, size, placed = bytearray(), 0, False
    # inside it may be cut
    try:
        with ExitStack() as paced:
            if not known or int(declared) <= 2 * limit:
                body, size, placed = await _read(request, limit, places, held, paced)
    except ClientDisconnect as error:
        raise RequestRefused(499, "time", "the client has gone") from error
    except TimeoutError as error:
        raise RequestRefused(
            408,
            "time",
            f"the body did not come within {BODY_SECONDS:g} seconds, paused for "
            f"{STALL_SECONDS:g}, or brought less than {STEADY_BYTES} bytes in these, or, while "
            f"others waited, less than {HURRY_BYTES} in {HURRY_SECONDS:g}",
        ) from error
    # one that is too long gets no place
    if size > limit or (known and int(declared) > limit):
        raise RequestRefused(
            413, "size", f"expected a body of at most {limit} bytes; send fewer images at a time"
        )
    if not placed:
        await held.enter_async_context(places.one())
    return body


async def _read(
    request: Request, limit: int, places: Places, held: AsyncExitStack, paced: ExitStack
) -> tuple[bytearray, int, bool]:
    """Read up to twice `limit` bytes -> the first of them, how many came, and whether `held` has a
    place. Raises TimeoutError."""
    body, size, due = bytearray(), 0, 0
    pace: Pace | None = None
    clock = asyncio.get_running_loop()
    end = clock.time() + BODY_SECONDS
    async with asyncio.timeout_at(min(end, clock.time() + STALL_SECONDS)) as limited:
        async for part in request.stream():
            size += len(part)
            # a place, whose wait does not count
            if size > SMALL_BYTES and pace is None:
                limited.reschedule(None)
                began = clock.time()
                await held.enter_async_context(places.one())
                end += clock.time() - began
                pace = Pace(clock.time(), lambda: limited.reschedule(clock.time()))
                paced.enter_context(places.reading(pace))
            # what came in time gets more of it
            if pace is not None:
                pace.came(size, clock.time())
            if size >= due:
                limited.reschedule(min(end, clock.time() + STALL_SECONDS))
                due = size + STEADY_BYTES if pace is not None else 0
            body += part if size <= limit else b""
            if size > 2 * limit:
                break
    return body, size, pace is not None


class Pace:
    """How fast a body comes that holds a place."""

    def __init__(self, now: float, cut: Callable[[], None]) -> None:
        self.since, self.cut, self._enough = now, cut, HURRY_BYTES

    def came(self, size: int, now: float) -> None:
        """Note that so many bytes of it are there."""
        if size >= self._enough:
            self.since, self._enough = now, size + HURRY_BYTES


class Places:
    """So many requests are in work or held whole; further ones wait for a place, in their order.

    A body that comes slowly may hold its place while nobody wants it. Once all are taken and
    somebody waits, those that have brought fewer than HURRY_BYTES in HURRY_SECONDS are cut, the
    slowest first, as many as wait. So clients that drip keep others waiting for about so long, once
    for each time that they fill all places.
    """

    def __init__(self, count: int) -> None:
        self._room = asyncio.Semaphore(count)
        self._reading: list[Pace] = []
        self._waiting = 0
        self._watch: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside."""
        self._waiting += 1
        try:
            if self._room.locked() and self._watch is None:
                self._watch = asyncio.create_task(self._hurry())
            await self._room.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._room.release()

    @contextmanager
    def reading(self, pace: Pace) -> Iterator[None]:
        """Let a body be cut inside, as long as it is read."""
        self._reading.append(pace)
        try:
            yield
        finally:
            self._reading.remove(pace)

    async def _hurry(self) -> None:
        """Cut slow bodies for as long as somebody waits."""
        clock = asyncio.get_running_loop()
        try:
            while self._waiting:
                late = clock.time() - HURRY_SECONDS
                slow = sorted(self._reading, key=lambda pace: pace.since)
                for pace in slow[: self._waiting]:
                    # one that ends at this moment by itself cannot be cut any more
                    with suppress(RuntimeError):
                        if pace.since <= late:
                            pace.cut()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._watch = None
