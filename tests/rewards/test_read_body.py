"""How long a reward server reads a body, on a clock that jumps to whatever is waited for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from rewards.remote.places import HURRY_BYTES, Places
from rewards.remote.read_body import BODY_SECONDS, SMALL_BYTES, STEADY_BYTES, read_body
from rewards.remote.read_request import RequestRefused


class Jumping(selectors.DefaultSelector):
    """Wait for nothing, and note how long it would have been."""

    now = 0.0  # seconds

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


class Sender:
    """A request whose body comes as (bytes, seconds before them)."""

    def __init__(self, *parts: tuple[int, float]) -> None:
        self.parts = parts
        self.headers = {"content-length": str(sum(size for size, _ in parts))}

    async def stream(self) -> AsyncIterator[bytes]:
        for size, pause in self.parts:
            await asyncio.sleep(pause)
            yield bytes(size)


class Late(Places):
    """Give a place after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self.seconds = seconds

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await asyncio.sleep(self.seconds)
        yield


def read(*parts: tuple[int, float], place_after: float = 0) -> tuple[int, float]:
    """Read a body -> its bytes, or 0 if it was refused, and the seconds that it took."""

    async def both() -> tuple[int, float]:
        clock, sender = asyncio.get_running_loop(), Sender(*parts)
        try:
            async with AsyncExitStack() as held:
                places = Late(place_after)
                got = len(await read_body(sender, 2**20, places, held))  # type: ignore[arg-type]
        except RequestRefused as error:
            assert error.status == 408
            got = 0
        return got, clock.time()

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(both())


FIRST = (SMALL_BYTES + 4000, 0.0)


def test_a_body_that_drips_gives_its_place_back() -> None:
    """One byte every 5 seconds, as long as a body may take."""
    got, seconds = read(FIRST, *[(1, 5.0)] * 20)
    assert got == 0 and seconds == pytest.approx(10)
    # nor once more has come in time
    got, seconds = read(FIRST, (STEADY_BYTES, 9.0), *[(1, 5.0)] * 20)
    assert got == 0 and seconds == pytest.approx(19)


def test_a_slow_body_is_read() -> None:
    steady = [(STEADY_BYTES // 2, 4.0)] * 10
    assert read(FIRST, *steady, (7, 9.0), place_after=1000.0)[0] == FIRST[0] + 5 * STEADY_BYTES + 7
    # below SMALL_BYTES it holds no place, and each byte counts
    assert read(*[(1, 9.0)] * 12) == (12, 108.0)
    got, seconds = read(*[(1, 9.0)] * 20)
    assert got == 0 and seconds == pytest.approx(BODY_SECONDS)


def together(*bodies: tuple[float, tuple[tuple[int, float], ...]], room: int) -> list[float | None]:
    """Read bodies that begin at such times, with `room` places -> when each was whole, None where
    it was refused."""

    async def one(places: Places, start: float, parts: tuple[tuple[int, float], ...]) -> Any:
        await asyncio.sleep(start)
        try:
            async with AsyncExitStack() as held:
                await read_body(Sender(*parts), 2**22, places, held)  # type: ignore[arg-type]
                return asyncio.get_running_loop().time()
        except RequestRefused as error:
            assert error.status == 408
            return None

    async def every() -> list[float | None]:
        places = Places(room)
        return await asyncio.gather(*(one(places, *body) for body in bodies))

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(every())


DRIP = (FIRST, *[(1, 0.5)] * 40)


def test_a_good_body_is_read_among_many_that_drip() -> None:
    """Eight places, twenty clients that drip, and one with 200 KB a moment later. By hand: 13 wait,
    so after a second all eight are cut, after two the next eight, and of those that wait the good
    one is the fifth. A look is every .1 seconds."""
    dripping = [(0.0, DRIP)] * 20
    *_, when = together(*dripping, (0.25, ((200_000, 0.0),)), room=8)
    assert when == pytest.approx(2.1, abs=0.11)


def test_many_bodies_at_an_honest_pace_are_all_read() -> None:
    """Eight places and a hundred bodies of 100 KB, each at three times the pace that is asked for:
    none is refused, however many wait."""
    pace = HURRY_BYTES * 3 // 10
    body = ((SMALL_BYTES + pace, 0.0), *[(pace, 0.1)] * 20)
    assert None not in together(*[(0.0, body)] * 100, room=8)


def test_slow_bodies_are_cut_only_for_others() -> None:
    """Alone one that drips stays until STALL_SECONDS; one that brings just enough stays, though
    others wait; what holds a place and is whole already stays as well."""
    (alone,) = together((0.0, (FIRST, *[(1, 0.5)] * 16)), room=1)
    assert alone == pytest.approx(8)
    steady = (FIRST, *[(HURRY_BYTES, 0.9)] * 10)
    first, second = together((0.0, steady), (0.1, ((200_000, 0.0),)), room=1)
    assert first == pytest.approx(9) and second is not None and second == pytest.approx(9)
