"""How long a reward server reads a body, on a clock that jumps to whatever is waited for."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator
from typing import Any

import pytest

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


def read(*parts: tuple[int, float], place_after: float = 0) -> tuple[int, float]:
    """Read a body -> its bytes, or 0 if it was refused, and the seconds that it took."""

    async def take_place() -> None:
        await asyncio.sleep(place_after)

    async def both() -> tuple[int, float]:
        clock, sender = asyncio.get_running_loop(), Sender(*parts)
        try:
            got = len(await read_body(sender, 2**20, take_place))  # type: ignore[arg-type]
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
