"""The HTTP side of hosted rewards: POST /score, GET /health, GET /metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from flowrl import __version__
from flowrl.batching import Answer, Batcher, ScoreRequest
from flowrl.errors import DataError
from flowrl.wire import Limits, Refused, parse

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

BODY_SECONDS = 120.0  # for a client to send its pictures
IN_HAND = 128  # requests held in memory; further ones are read once there is room, and not refused


def make_app(batcher: Batcher, limits: Limits, token: bytes = b"") -> Starlette:
    """Return the ASGI application: POST /score, GET /health, GET /metrics; errors are JSON as well."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    service = _Service(batcher, limits, token)

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # a wrong path or method
        text = "there is POST /score, GET /health and GET /metrics"
        return JSONResponse({"error": text, "kind": "request"}, error.status_code, error.headers)

    routes = [
        Route("/score", service.guard(service.score), methods=["POST"]),
        Route("/health", service.guard(service.health), methods=["GET"]),
        Route("/metrics", service.guard(service.metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: missing})


Handler = Callable[["Request"], Awaitable["Response"]]


class _Service:
    """What the three addresses answer."""

    def __init__(self, batcher: Batcher, limits: Limits, token: bytes) -> None:
        self.batcher, self.limits, self.token = batcher, limits, token
        self.requests: Counter[int] = Counter()  # {status: answers of /score}
        self.seconds = 0.0  # in /score, waiting included
        self.room = asyncio.Semaphore(IN_HAND)

    def guard(self, handler: Handler) -> Handler:
        """Ask for the token before anything is read, and turn failures into JSON."""
        from starlette.responses import JSONResponse

        async def guarded(request: Request) -> Response:
            try:
                self._check_token(request)
                return await handler(request)
            except Refused as error:
                headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
                return JSONResponse({"error": str(error), "kind": error.kind}, error.status, headers)

        return guarded

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.token)  # always: its time tells nothing
        if self.token and not (same and scheme.lower() == "bearer"):
            raise Refused(401, "token", "expected the header 'Authorization: Bearer <token>' with this server's token")

    async def score(self, request: Request) -> Response:
        """Score the pictures of one request: {"scores": {name: [number | null]}, "images": count}."""
        began, status = time.perf_counter(), 500
        try:
            response = await self._score(request)
            status = response.status_code
            return response
        except Refused as error:
            status = error.status
            raise
        finally:
            self.requests[status] += 1
            self.seconds += time.perf_counter() - began

    async def _score(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "request", "expected the header 'Content-Type: application/json'")
        async with self.room:
            body = await _body(request, self.limits.bytes)
            wanted = await asyncio.to_thread(parse, body, tuple(self.batcher.rewards), self.limits)
            del body
            answer = await self._answer(request, wanted)
        return JSONResponse({"scores": answer, "images": len(wanted.prompts)})

    async def _answer(self, request: Request, wanted: ScoreRequest) -> Answer:
        """Wait for the scores, or until the client has gone: then nobody needs them."""
        scored = asyncio.ensure_future(asyncio.wrap_future(self.batcher.submit(wanted)))
        gone = asyncio.ensure_future(request.receive())  # after the body comes nothing but the disconnect
        both: set[asyncio.Future[Any]] = {scored, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not scored.done():
            scored.cancel()
            raise Refused(499, "time", "the client has gone")
        try:
            return scored.result()
        except Exception as error:  # whatever the reward raised
            kind = "data" if isinstance(error, DataError) else "reward"
            raise Refused(500, kind, f"{type(error).__name__}: {error}") from error

    async def health(self, request: Request) -> Response:
        """Say that the server is up, what it hosts and what it takes."""
        from starlette.responses import JSONResponse

        limits = {"bytes": self.limits.bytes, "images": self.limits.images, "pixels": self.limits.all_pixels}
        rewards = list(self.batcher.rewards)
        return JSONResponse({"status": "ok", "rewards": rewards, "limits": limits, "flowrl": __version__})

    async def metrics(self, request: Request) -> Response:
        """Answer in Prometheus' text format."""
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("\n".join(self._lines()) + "\n", media_type="text/plain; version=0.0.4")

    def _lines(self) -> Iterator[str]:
        counts, (queued, pictures) = self.batcher.counts, self.batcher.waiting()
        requests = {f'{{status="{status}"}}': number for status, number in sorted(self.requests.items())}
        per_reward = [(name, f'{{reward="{name}"}}') for name in self.batcher.rewards]
        for name, kind, text, values in (
            ("requests_total", "counter", "answered requests to /score, by HTTP status", requests),
            ("images_total", "counter", "pictures scored", {"": counts.images}),
            ("failures_total", "counter", "requests that a reward could not score", {"": counts.failures}),
            ("batches_total", "counter", "batches of joined requests", {"": counts.batches}),
            ("queue_requests", "gauge", "requests that wait for a batch", {"": queued}),
            ("queue_images", "gauge", "pictures that wait for a batch", {"": pictures}),
            ("request_seconds_total", "counter", "seconds from request to answer, summed", {"": self.seconds}),
            ("unscored_total", "counter", "scores that are null", {k: counts.unscored[n] for n, k in per_reward}),
            ("calls_total", "counter", "calls of a reward", {k: counts.calls[n] for n, k in per_reward}),
            (
                "reward_seconds_total",
                "counter",
                "seconds inside a reward",
                {k: counts.seconds[n] for n, k in per_reward},
            ),
        ):
            yield f"# HELP flowrl_{name} {text}"
            yield f"# TYPE flowrl_{name} {kind}"
            yield from (f"flowrl_{name}{label} {value}" for label, value in values.items())


async def _body(request: Request, limit: int) -> bytearray:
    """Read a body of at most `limit` bytes. What is a little longer is read to its end, so that its sender listens."""
    from starlette.requests import ClientDisconnect

    body, size = bytearray(), 0
    declared = request.headers.get("content-length", "0")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if not declared.isdigit() or int(declared) <= 2 * limit:
                async for part in request.stream():
                    size += len(part)
                    body += part if size <= limit else b""
                    if size > 2 * limit:
                        break
    except ClientDisconnect as error:
        raise Refused(499, "time", "the client has gone") from error
    except TimeoutError as error:
        raise Refused(408, "time", f"the body did not come within {BODY_SECONDS:g} seconds") from error
    if size > limit or (declared.isdigit() and int(declared) > limit):
        raise Refused(413, "size", f"expected a body of at most {limit} bytes; send fewer pictures at a time")
    return body
