"""Read a request's body, from clients that may be slow, send too much, or stop half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from .read_request import RequestRefused

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_SECONDS = 120.0  # for a client to send its images
STALL_SECONDS = 10.0  # without a byte; of one that holds a place, without STEADY_BYTES more
SMALL_BYTES = 2**16  # what a body may hold before it has a place; half-sent ones mostly stay below
STEADY_BYTES = 2**16  # what a body that holds a place brings in every STALL_SECONDS


async def read_body(
    request: Request, limit: int, take_place: Callable[[], Awaitable[None]]
) -> bytearray:
    """Read a body of at most `limit` bytes.

    A place is awaited once the body is longer than SMALL_BYTES, or at its end. So clients that
    send half a body keep nobody waiting, and what many bodies hold together stays bounded. The
    wait for a place counts neither as a pause nor as time of the client. With a place a byte now
    and then is a pause, too: else a few that drip would hold every place.

    What is a little longer than `limit` is read to its end, so that its sender listens.

    Raises RequestRefused: too long, too slow, or the client has gone.
    """
    from starlette.requests import ClientDisconnect

    # the length is only what the client says, and may be missing
    body, size, placed, due = bytearray(), 0, False, 0
    declared = request.headers.get("content-length", "0")[:20]
    known = declared.isascii() and declared.isdigit()  # "²" is a digit, too
    clock = asyncio.get_running_loop()
    end = clock.time() + BODY_SECONDS
    # two limits of time: for the whole, and for pauses
    try:
        async with asyncio.timeout_at(min(end, clock.time() + STALL_SECONDS)) as limited:
            if not known or int(declared) <= 2 * limit:
                async for part in request.stream():
                    size += len(part)
                    # the wait for a place is ours, so it is added to the client's time
                    if size > SMALL_BYTES and not placed:
                        limited.reschedule(None)
                        began, placed = clock.time(), True
                        await take_place()
                        end += clock.time() - began
                    # with a place it has to bring so many bytes before the limit is moved
                    if size >= due:
                        limited.reschedule(min(end, clock.time() + STALL_SECONDS))
                        due = size + STEADY_BYTES if placed else 0
                    # past the limit bytes are only counted
                    body += part if size <= limit else b""
                    if size > 2 * limit:
                        break
    except ClientDisconnect as error:
        raise RequestRefused(499, "time", "the client has gone") from error
    except TimeoutError as error:
        raise RequestRefused(
            408,
            "time",
            f"the body did not come within {BODY_SECONDS:g} seconds, paused for "
            f"{STALL_SECONDS:g}, or brought less than {STEADY_BYTES} bytes in these",
        ) from error
    # the sender of a body that is a little too long listens only now
    if size > limit or (known and int(declared) > limit):
        raise RequestRefused(
            413, "size", f"expected a body of at most {limit} bytes; send fewer images at a time"
        )
    if not placed:
        await take_place()
    return body
