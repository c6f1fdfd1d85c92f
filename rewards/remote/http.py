"""The HTTP side of hosted rewards: POST /score and /check, GET /health, GET /metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from flowrl.core.abilities import judges_singly, judges_videos
from flowrl.core.errors import FAILURES, DataError, FlowRLError
from flowrl.core.local_server import asked_here, from_another_page, is_json, json_response
from flowrl.core.version import __version__

from .read_body import Places, read_body
from .read_request import Decoded, RequestLimits, RequestRefused, parse, parse_records
from .request_queue import Answer, RequestQueue, ScoreRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}  # of refusals
IN_HAND = 128  # requests in work or held whole; further ones wait for a place and are not refused


def make_app(
    queue: RequestQueue,
    limits: RequestLimits,
    token: bytes = b"",
    settings: Mapping[str, Any] | None = None,
) -> Starlette:
    """Return the ASGI application: POST /score and /check, GET /health, GET /metrics; errors are
    JSON as well. With a token every address asks for it, without one only a loopback name is
    answered. settings: of each reward, its fn and arguments, which clients compare."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    service = _Handlers(queue, limits, token, dict(settings or {}))

    # Starlette answers a wrong path or method in plain text; here it is JSON
    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # a wrong path or method
        text = "there is POST /score, POST /check, GET /health and GET /metrics"
        return json_response({"error": text, "kind": "request"}, error.status_code, error.headers)

    # every handler stands behind the token
    routes = [
        Route("/score", service.guard(service.score), methods=["POST"]),
        Route("/check", service.guard(service.check), methods=["POST"]),
        Route("/health", service.guard(service.health), methods=["GET"]),
        Route("/metrics", service.guard(service.metrics), methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: missing})


Handler = Callable[["Request"], Awaitable["Response"]]


class _Handlers:
    """What the addresses answer."""

    def __init__(
        self,
        queue: RequestQueue,
        limits: RequestLimits,
        token: bytes,
        settings: dict[str, Any],
    ) -> None:
        self.queue, self.limits, self.token, self.settings = queue, limits, token, settings
        hosted = queue.rewards.items()
        self.videos = [name for name, reward in hosted if judges_videos(reward)]
        self.singly = [name for name, reward in hosted if judges_singly(reward)]
        self.checks = [name for name, reward in hosted if hasattr(reward, "check_record")]
        self.requests: Counter[int] = Counter()  # {status: answers of /score}
        self.seconds = 0.0  # in /score, waiting included
        self.room, self.decoded = Places(IN_HAND), Decoded(limits.held)

    def guard(self, handler: Handler) -> Handler:
        """Check who asks before anything is read, and turn failures into JSON."""

        async def guarded(request: Request) -> Response:
            try:
                self._admit(request)
                return await handler(request)
            except RequestRefused as error:
                said = {"error": str(error), "kind": error.kind}
                return json_response(said, error.status, HEADERS.get(error.status))

        return guarded

    def _admit(self, request: Request) -> None:
        """Refuse a page of another site, who has no token, or where there is none, a foreign name
        of this machine."""
        if from_another_page(request):
            raise RequestRefused(403, "request", "expected a program to ask, not a web page")
        if not self.token:
            if not asked_here(request):
                raise RequestRefused(
                    403,
                    "request",
                    "expected to be asked as localhost; for other names start the server with "
                    "--token-env",
                )
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # compared always: its time tells nothing
        same = hmac.compare_digest(given.strip().encode(), self.token)
        if not (same and scheme.lower() == "bearer"):
            raise RequestRefused(
                401,
                "token",
                "expected the header 'Authorization: Bearer <token>' with this server's token",
            )

    async def score(self, request: Request) -> Response:
        """Score the images of one request: {"scores": {name: [number | null]}, "images":
        count, "settings", "flowrl"}."""
        began, status = time.perf_counter(), 500
        try:
            response = await self._score(request)
            status = response.status_code
            return response
        except RequestRefused as error:
            status = error.status
            raise
        finally:
            self.requests[status] += 1
            self.seconds += time.perf_counter() - began

    async def _score(self, request: Request) -> Response:
        async with AsyncExitStack() as held:
            body = await self._body(request, held)
            known = tuple(self.queue.rewards)
            take = held.enter_context(self.decoded.share())
            wanted = await asyncio.to_thread(parse, body, known, self.limits, self.videos, take)
            del body
            answer = await self._answer(request, wanted)
        told = {name: self.settings[name] for name in answer if name in self.settings}
        found = {"scores": answer, "images": len(wanted.prompts), "settings": told}
        return json_response({**found, "flowrl": __version__})

    async def _body(self, request: Request, held: AsyncExitStack) -> bytearray:
        """Read a body of JSON; from then on `held` has a place."""
        if not is_json(request):
            raise RequestRefused(
                415, "request", "expected the header 'Content-Type: application/json'"
            )
        return await read_body(request, self.limits.bytes, self.room, held)

    async def _answer(self, request: Request, wanted: ScoreRequest) -> Answer:
        """Wait for the scores, or until the client has gone: then nobody needs them."""
        scored = asyncio.ensure_future(asyncio.wrap_future(self.queue.submit(wanted)))
        # after the body comes nothing but the disconnect
        gone = asyncio.ensure_future(request.receive())
        both: set[asyncio.Future[Any]] = {scored, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not scored.done():
            scored.cancel()
            raise RequestRefused(499, "time", "the client has gone")
        try:
            return scored.result()
        except Exception as error:  # whatever the reward raised
            kind = "data" if isinstance(error, DataError) else "reward"
            raise RequestRefused(500, kind, f"{type(error).__name__}: {error}") from error

    async def check(self, request: Request) -> Response:
        """Show a reward the prompts' records, before the first image is made: {"fault": text |
        null}, of the first that it refuses."""
        async with AsyncExitStack() as held:
            body = await self._body(request, held)
            name, records, places = await asyncio.to_thread(
                parse_records, body, tuple(self.queue.rewards)
            )
            fault = await asyncio.to_thread(_first_fault, self.queue.rewards[name], records, places)
        return json_response({"fault": fault})

    async def health(self, request: Request) -> Response:
        """Say that the server is up, what it hosts and what it takes."""
        limits = {
            "bytes": self.limits.bytes,
            "images": self.limits.images,
            "pixels": self.limits.all_pixels,
            "held": self.limits.held,
        }
        facts: dict[str, Any] = {"rewards": list(self.queue.rewards), "checks": self.checks}
        facts |= {"videos": self.videos, "singly": self.singly, "settings": self.settings}
        return json_response({"status": "ok", **facts, "limits": limits, "flowrl": __version__})

    async def metrics(self, request: Request) -> Response:
        """Answer in Prometheus' text format."""
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(
            "\n".join(self._lines()) + "\n", media_type="text/plain; version=0.0.4"
        )

    def _lines(self) -> Iterator[str]:
        for name, (kind, text, values) in self._figures().items():
            yield f"# HELP flowrl_{name} {text}"
            yield f"# TYPE flowrl_{name} {kind}"
            yield from (f"flowrl_{name}{label} {value}" for label, value in values.items())

    def _figures(self) -> dict[str, tuple[str, str, dict[str, float]]]:
        """Return {name: (kind, what it is, {label: value})}."""
        # what one number says
        counts, (queued, images) = self.queue.counts, self.queue.waiting()
        singles = {
            "images_total": ("counter", "images scored", counts.images),
            "failures_total": (
                "counter",
                "requests that a reward could not score",
                counts.failures,
            ),
            "batches_total": ("counter", "batches of joined requests", counts.batches),
            "queue_requests": ("gauge", "requests that wait for a batch", queued),
            "queue_images": ("gauge", "images that wait for a batch", images),
            "held_bytes": ("gauge", "bytes of decoded images of all requests", self.decoded.held),
            "request_seconds_total": (
                "counter",
                "seconds from request to answer, summed",
                self.seconds,
            ),
        }
        # what has one for each status or reward
        statuses = {f'{{status="{code}"}}': n for code, n in sorted(self.requests.items())}
        text = "answered requests to /score, by HTTP status"
        out: dict[str, tuple[str, str, dict[str, float]]] = {
            "requests_total": ("counter", text, dict(statuses))
        }
        for name, (kind, about, value) in singles.items():
            out[name] = (kind, about, {"": value})
        for name, about, values in (
            ("unscored_total", "scores that are null", counts.unscored),
            ("calls_total", "calls of a reward", counts.calls),
            ("reward_seconds_total", "seconds inside a reward", counts.seconds),
        ):
            labelled = {f'{{reward="{reward}"}}': values[reward] for reward in self.queue.rewards}
            out[name] = ("counter", about, labelled)
        return out


def _first_fault(reward: Any, records: list[dict[str, Any]], places: list[str]) -> str | None:
    """Return what a reward says of the first record that it refuses."""
    if not hasattr(reward, "check_record"):
        return None
    for record, place in zip(records, places, strict=True):
        try:
            reward.check_record(record, place)
        except FlowRLError as error:
            return str(error)
        except FAILURES as error:  # a reward of somebody's own
            return f"{place}: {type(error).__name__}: {error}"
    return None
