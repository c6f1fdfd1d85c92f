"""Read a request's body, from clients that may be slow, send too much, or stop half-way."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

from .places import HURRY_BYTES, HURRY_SECONDS, Pace, Places
from .read_request import RequestRefused

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_SECONDS = 120.0  # for a client to send its images
STALL_SECONDS = 10.0  # without a byte; of one that holds a place, without STEADY_BYTES more
SMALL_BYTES = 2**16  # what a body may hold before it has a place; half-sent ones mostly stay below
STEADY_BYTES = 2**16  # what a body that holds a place brings in every STALL_SECONDS


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
