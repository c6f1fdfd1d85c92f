"""Places for requests that are in work or held whole, and who gives one up while others wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

HURRY_SECONDS = 1.0  # while others wait for a place, a body that holds one has to bring
HURRY_BYTES = 2**16 // 10  # so much more in each of these
LOOK_SECONDS = 0.1  # between two looks at who is too slow


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
