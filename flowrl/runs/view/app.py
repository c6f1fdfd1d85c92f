"""What the pages of `flowrl view` ask for over HTTP: JSON and PNG."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import FlowRLError
from flowrl.core.local_server import asked_here, is_json, json_response
from flowrl.runs.report.page import SCRIPTS, source, template_environment
from flowrl.runs.report.page_data import story
from flowrl.runs.report.sample_images import sample_as_png, sample_index, source_as_png
from flowrl.runs.view.ballots import Booth, Side
from flowrl.runs.view.listing import find_runs, stamp, summary_of

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Handler = Callable[["Request"], Awaitable["Response"]]
FILES = {*SCRIPTS, "live.js", "vote.js", "page.css"}
BODY = 4096  # bytes of a vote
COOKIE = "flowrl"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Refused(FlowRLError):
    """A request that is not served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(folder: Path, box: Path, token: bytes = b"") -> Starlette:
    """Return the ASGI application for the runs below a folder and the votes in `box`; with a token
    every address asks for it, without one only a loopback name is answered."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    # pages, then what they ask for; all behind the guard
    here = _Handlers(folder, Booth(box), token)
    routes = [
        Route("/", here.guard(here.page("live.html"))),
        Route("/vote", here.guard(here.page("vote.html"))),
        Route("/favicon.ico", here.guard(here.no_icon)),
        Route("/files/{name}", here.guard(here.file)),
        Route("/api/runs", here.guard(here.runs)),
        Route("/api/story", here.guard(here.story)),
        Route("/api/image", here.guard(here.image)),
        Route("/api/source", here.guard(here.start)),
        Route("/api/ballot", here.guard(here.ballot)),
        Route("/api/side", here.guard(here.side)),
        Route("/api/vote", here.guard(here.vote), methods=["POST"]),
        Route("/api/scores", here.guard(here.scores)),
    ]
    return Starlette(routes=routes)


class _Handlers:
    """What each address answers."""

    def __init__(self, folder: Path, booth: Booth, token: bytes) -> None:
        self.folder, self.booth, self.token = folder, booth, token

    def guard(self, handler: Handler) -> Handler:
        """Check who asks before anything is read, and turn failures into JSON."""

        async def guarded(request: Request) -> Response:
            try:
                response = self._admitted(request) or await handler(request)
            except Refused as error:
                response = json_response({"error": str(error)}, error.status)
            except FlowRLError as error:
                response = json_response({"error": str(error)}, 422)
            response.headers.update(HEADERS)
            return response

        return guarded

    def _admitted(self, request: Request) -> Response | None:
        """Raise Refused for who has no token, or for a foreign name of this machine, which a page
        from elsewhere could use. A token in the address becomes a cookie: then a redirection."""
        from starlette.responses import RedirectResponse

        # without a token: a foreign site may let its own name point here, but not localhost
        if not self.token:
            if not asked_here(request):
                raise Refused(403, "expected to be asked as localhost")
            return None
        # the token leaves the address at once, so that it is in no history and no screenshot
        given = request.query_params.get("token", "")
        if given and self._same(given):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        # programs send it in a header, browsers as the cookie
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        known = bearer.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
        if not self._same(known):
            raise Refused(401, "expected the token: open the address with ?token=... once")
        return None

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token)

    def page(self, name: str) -> Handler:
        """Return the handler of a page."""
        from starlette.responses import HTMLResponse

        async def answer(request: Request) -> Response:
            return HTMLResponse(template_environment().get_template(name).render(scripts=SCRIPTS))

        return answer

    async def file(self, request: Request) -> Response:
        """Answer with a script or the style of the pages."""
        from starlette.responses import Response

        name = request.path_params["name"]
        if name not in FILES:
            raise Refused(404, "there is no such file")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(source(name), media_type=kind)

    async def no_icon(self, request: Request) -> Response:
        """Answer that there is no icon, which browsers ask for unasked."""
        from starlette.responses import Response

        return Response(status_code=204)

    async def runs(self, request: Request) -> Response:
        """List the runs."""

        def look() -> list[dict[str, Any]]:
            return [summary_of(name, run) for name, run in find_runs(self.folder).items()]

        return json_response(await asyncio.to_thread(look))

    async def story(self, request: Request) -> Response:
        """Tell a run, unless it is as the asker knows it."""
        from starlette.responses import Response

        name = request.query_params.get("run", "")
        run, now = await self._run(name), ""
        now = await asyncio.to_thread(stamp, run)
        if request.query_params.get("known") == now:
            return Response(status_code=204)

        def look() -> dict[str, Any]:
            whole = story(run)
            return {**whole, "name": name, "id": name, "stamp": now, "samples": sample_index(run)}

        return json_response(await asyncio.to_thread(look))

    async def image(self, request: Request) -> Response:
        """Answer with one sample as PNG."""
        from starlette.responses import Response

        run = await self._run(request.query_params.get("run", ""))
        iteration = _whole(request, "iteration")
        png = await asyncio.to_thread(sample_as_png, run, iteration, _whole(request, "place"))
        return Response(png, media_type="image/png")

    async def start(self, request: Request) -> Response:
        """Answer with one of the images that a sample starts from as PNG."""
        from starlette.responses import Response

        run = await self._run(request.query_params.get("run", ""))
        place, which = _whole(request, "place"), _whole(request, "which")
        png = await asyncio.to_thread(source_as_png, run, place, which)
        return Response(png, media_type="image/png")

    async def ballot(self, request: Request) -> Response:
        """Hand out a ballot on two checkpoints, or one that a run waits for."""
        voter, given = _voter(request.query_params.get("voter")), request.query_params
        if "one" not in given and "two" not in given:
            return json_response(await asyncio.to_thread(self.booth.next_asked, voter))
        one, two = _side(given.get("one", "")), _side(given.get("two", ""))
        runs = await asyncio.to_thread(find_runs, self.folder)
        found = await asyncio.to_thread(self.booth.next_compared, voter, one, two, runs)
        return json_response(found)

    async def side(self, request: Request) -> Response:
        """Answer with one image of a ballot, or with what both start from."""
        from starlette.responses import Response

        given = request.query_params
        path = self.booth.image(given.get("ballot", ""), given.get("side", ""))
        if path is None:
            raise Refused(410, "this ballot is no longer known; take another one")
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise Refused(410, "this image is no longer there; take another ballot") from error
        return Response(data, media_type="image/png")

    async def vote(self, request: Request) -> Response:
        """Keep a vote."""
        # what another page could send in a visitor's name is refused
        if not is_json(request):
            raise Refused(415, "expected the header 'Content-Type: application/json'")
        # read no more than a vote can be long
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise Refused(413, f"expected a body of at most {BODY} bytes")
        # the three texts of a vote
        try:
            given = json.loads(body)
            key, choice, voter = (given[name] for name in ("ballot", "choice", "voter"))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refused(400, "expected JSON with ballot, choice and voter") from error
        if not all(isinstance(text, str) for text in (key, choice)):
            raise Refused(400, "expected ballot and choice as texts")
        # in a thread: other pages are answered while the vote is written
        if not await asyncio.to_thread(self.booth.vote, key, choice, _voter(voter)):
            raise Refused(410, "this ballot is no longer known, so its vote was not counted")
        return json_response({"ok": True})

    async def scores(self, request: Request) -> Response:
        """Answer with the strengths of what was compared."""
        return json_response(await asyncio.to_thread(self.booth.scores))

    async def _run(self, name: str) -> Path:
        runs = await asyncio.to_thread(find_runs, self.folder)
        if name not in runs:
            raise Refused(404, "there is no such run")
        return runs[name]


def _voter(given: Any) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"[0-9a-f]{8,32}", given):
        raise Refused(400, "expected a voter of 8 to 32 hexadecimal digits")
    return given


def _side(given: str) -> Side:
    run, _, iteration = given.rpartition("@")
    if not iteration.isdecimal() or not iteration.isascii() or len(iteration) > 12:
        raise Refused(400, f"expected RUN@ITERATION, got {given!r}")
    return Side(run, int(iteration))


def _whole(request: Request, name: str) -> int:
    given = request.query_params.get(name, "")
    if not given.isdecimal() or not given.isascii() or len(given) > 12:
        raise Refused(400, f"{name}: expected a whole number")
    return int(given)
