"""The pages of `flowrl view`: the runs below a folder, what the pages ask for over HTTP (JSON and
PNG), and the server, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import parse_json
from flowrl.core.local_server import (
    UVICORN,
    announce,
    asked_here,
    bind,
    forget,
    from_another_page,
    import_uvicorn,
    is_json,
    json_response,
    listening_address,
    no_exit_by_signal,
    read_token,
    url,
)
from flowrl.runs.report.page import SCRIPTS, source, story, template_environment
from flowrl.runs.report.samples import (
    sample_as_png,
    sample_files,
    sample_index,
    source_as_png,
    thumbnail,
)
from flowrl.runs.view.apart import Verdicts
from flowrl.runs.view.ballots import PATH, Booth, Links, Side, mark_of
from flowrl.runs.view.listing import Listing, find_runs, stamp, stamps

PORT = 8322


if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Handler = Callable[["Request"], Awaitable["Response"]]
FILES = {*SCRIPTS, "live.js", "vote.js", "page.css"}
BODY, BODY_SECONDS = 4096, 10.0  # of a vote, and of what asks for a ballot
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
        Route("/api/samples", here.guard(here.samples)),
        Route("/api/image", here.guard(here.image)),
        Route("/api/thumbnail", here.guard(here.thumbnail)),
        Route("/api/source", here.guard(here.start)),
        Route("/api/ballot", here.guard(here.ballot), methods=["POST"]),
        Route("/api/side", here.guard(here.side)),
        Route("/api/vote", here.guard(here.vote), methods=["POST"]),
        Route("/api/scores", here.guard(here.scores)),
        Route("/api/link", here.guard(here.link), methods=["POST"]),
    ]
    # what a link to send opens, behind its own token: the vote, and nothing else
    voting = PATH + "{token}"
    routes += [
        Route(voting, here.guard(here.page("vote.html"), invited=True)),
        Route(f"{voting}/files/{{name}}", here.guard(here.file, invited=True)),
        Route(f"{voting}/api/ballot", here.guard(here.ballot, invited=True), methods=["POST"]),
        Route(f"{voting}/api/side", here.guard(here.side, invited=True)),
        Route(f"{voting}/api/vote", here.guard(here.vote, invited=True), methods=["POST"]),
    ]
    return Starlette(routes=routes)


class _Handlers:
    """What each address answers."""

    def __init__(self, folder: Path, booth: Booth, token: bytes) -> None:
        self.folder, self.booth, self.token = folder, booth, token
        self.listing, self.verdicts = Listing(folder), Verdicts()
        self.links = Links(booth.box)

    def guard(self, handler: Handler, *, invited: bool = False) -> Handler:
        """Check who asks before anything is read, and turn failures into JSON; `invited` are those
        who have a link."""
        admit = self._invited if invited else self._admitted

        async def guarded(request: Request) -> Response:
            try:
                # a page of another site, or of another program here, must not ask in a
                # visitor's name
                if from_another_page(request):
                    raise Refused(403, "expected to be asked by this server's own pages")
                response = admit(request) or await handler(request)
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

    def _invited(self, request: Request) -> Response | None:
        """Raise Refused for who has no link. Its token is proof enough under any name of this
        machine, so that a link works through a tunnel, where the rest does not."""
        if self.links.about(request.path_params["token"]) is None:
            raise Refused(404, "this link opens nothing: it was taken back, or is not whole")
        return None

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token)

    def page(self, name: str) -> Handler:
        """Return the handler of a page."""
        from starlette.responses import HTMLResponse

        async def answer(request: Request) -> Response:
            token = request.path_params.get("token")
            root = f"{PATH}{token}" if token else ""
            template = template_environment().get_template(name)
            scripts = SCRIPTS[:1] if token else SCRIPTS
            return HTMLResponse(template.render(scripts=scripts, root=root))

        return answer

    async def file(self, request: Request) -> Response:
        """Answer with a script or the style of the pages."""
        name = request.path_params["name"]
        if name not in FILES:
            raise Refused(404, "there is no such file")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return _plain(source(name).encode(), kind)

    async def no_icon(self, request: Request) -> Response:
        """Answer that there is no icon, which browsers ask for unasked."""
        return _plain(status=204)

    async def runs(self, request: Request) -> Response:
        """List the runs, unless the list is as the asker knows it."""
        lines = await asyncio.to_thread(self.listing.lines)
        answer = json_response(lines)
        tag = hashlib.blake2b(answer.body, digest_size=8).hexdigest()
        if request.query_params.get("known") == tag:
            return _plain(status=204)
        answer.headers["X-Known"] = tag
        return answer

    async def story(self, request: Request) -> Response:
        """Tell a run, unless it is as the asker knows it by its stamp."""
        name = request.query_params.get("run", "")
        run = await self._run(name)
        now = stamp(await asyncio.to_thread(stamps, run))
        if request.query_params.get("known") == now:
            return _plain(status=204)
        told = await asyncio.to_thread(self._told, name, run)
        return json_response({**told, "stamp": now})

    def _told(self, name: str, run: Path) -> dict[str, Any]:
        """Return what is known of a run, and which samples it has. Raises RunError."""
        told = story(run, self.verdicts.of(run))
        return {**told, "id": name, "name": name, "samples": sample_index(run)}

    async def samples(self, request: Request) -> Response:
        """List the iterations of which a run has samples."""
        run = await self._run(request.query_params.get("run", ""))
        return json_response(sorted(await asyncio.to_thread(sample_files, run)))

    async def image(self, request: Request) -> Response:
        """Answer with one sample as PNG."""
        run = await self._run(request.query_params.get("run", ""))
        iteration = _whole(request, "iteration")
        png = await asyncio.to_thread(sample_as_png, run, iteration, _whole(request, "place"))
        return _plain(png, "image/png")

    async def thumbnail(self, request: Request) -> Response:
        """Answer with a small picture of a run's first sample."""
        run = await self._run(request.query_params.get("run", ""))
        small = await asyncio.to_thread(thumbnail, run, _whole(request, "iteration"))
        return _plain(small, "image/webp")

    async def start(self, request: Request) -> Response:
        """Answer with one of the images that a sample starts from as PNG."""
        run = await self._run(request.query_params.get("run", ""))
        place, which = _whole(request, "place"), _whole(request, "which")
        png = await asyncio.to_thread(source_as_png, run, place, which)
        return _plain(png, "image/png")

    async def ballot(self, request: Request) -> Response:
        """Hand out a ballot on two checkpoints, or one that a run waits for. It is kept for the
        vote, and so no address that is merely looked at."""
        token = request.path_params.get("token")
        # who has a link has no say in what is compared
        given = await _body(request, ("voter",), () if token else ("one", "two"))
        voter, about = _voter(given["voter"]), _about(given)
        if token:
            about = self.links.about(token) or ()
        if not about:
            return json_response(await asyncio.to_thread(self.booth.next_asked, voter))
        one, two = map(_side, about)
        runs = await asyncio.to_thread(find_runs, self.folder)
        found = await asyncio.to_thread(self.booth.next_compared, voter, one, two, runs)
        return json_response(found)

    async def link(self, request: Request) -> Response:
        """Make the link on two checkpoints, or on what waits for votes; or take one back."""
        given = await _body(request, (), ("one", "two", "take_back"))
        if "take_back" in given:
            gone = await asyncio.to_thread(self.links.take_back, given["take_back"])
            return json_response({"taken_back": gone})
        about = _about(given)
        token = await asyncio.to_thread(make_link, self.folder, self.booth, self.links, about)
        return json_response({"token": token, "path": f"{PATH}{token}"})

    async def side(self, request: Request) -> Response:
        """Answer with one image of a ballot, or with what both start from."""
        given = request.query_params
        path = self.booth.image(given.get("ballot", ""), given.get("side", ""))
        if path is None:
            raise Refused(410, "this ballot is no longer known; take another one")
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise Refused(410, "this image is no longer there; take another ballot") from error
        return _plain(data, "image/png")

    async def vote(self, request: Request) -> Response:
        """Keep a vote."""
        given = await _body(request, ("ballot", "choice", "voter"))
        key, choice, voter = given["ballot"], given["choice"], given["voter"]
        # in a thread: other pages are answered while the vote is written
        token = request.path_params.get("token", "")
        mark = mark_of(token) if token else ""
        if not await asyncio.to_thread(self.booth.vote, key, choice, _voter(voter), mark):
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


def _plain(body: bytes = b"", kind: str | None = None, status: int = 200) -> Response:
    """Return an answer that is no JSON."""
    from starlette.responses import Response

    return Response(body, status, media_type=kind)


async def _body(
    request: Request, needed: tuple[str, ...], maybe: tuple[str, ...] = ()
) -> dict[str, str]:
    """Read a body of JSON: texts under the keys that are needed, and under some that may be there.
    Raises Refused."""
    # what another page could send in a visitor's name is refused
    if not is_json(request):
        raise Refused(415, "expected the header 'Content-Type: application/json'")
    # no more than it can be long, and no longer than that takes
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > BODY:
                    raise Refused(413, f"expected a body of at most {BODY} bytes")
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:g} seconds") from error
    wanted = " and ".join(needed)
    try:
        given = parse_json(body, "the body")
    except FlowRLError as error:
        raise Refused(400, f"expected JSON with {wanted}: {error}") from error
    if not isinstance(given, dict) or not {*needed} <= {*given} <= {*needed, *maybe}:
        raise Refused(400, f"expected JSON with {wanted}")
    if not all(isinstance(text, str) for text in given.values()):
        raise Refused(400, f"expected texts as {wanted}")
    return given


def _voter(given: Any) -> str:
    if not isinstance(given, str) or not re.fullmatch(r"[0-9a-f]{8,32}", given):
        raise Refused(400, "expected a voter of 8 to 32 hexadecimal digits")
    return given


def _about(given: dict[str, str]) -> tuple[str, ...]:
    """Return the two checkpoints that were named, () where none was."""
    if "one" not in given and "two" not in given:
        return ()
    return given.get("one", ""), given.get("two", "")


def make_link(folder: Path, booth: Booth, links: Links, about: tuple[str, ...]) -> str:
    """Return the token of the link on two checkpoints, or on what waits: (). Raises Refused,
    DataError for checkpoints that cannot be compared, RunError."""
    if about:
        one, two = map(_side, about)
        booth.check_compared(one, two, find_runs(folder))
    return links.make(about)


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


def serve_view(
    folder: Path,
    *,
    box: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_env: str = "",
    vote_link: tuple[str, ...] | None = None,
    json: Path | None = None,
) -> None:
    """Show the runs below a folder, and take votes into `box`, until SIGTERM or Ctrl-C.

    Args:
        host: address to listen on; any but a loopback one needs a token.
        port: 0 takes a free one. The address is printed once requests are answered.
        token_env: name of the environment variable with the token.
        vote_link: two checkpoints, RUN@ITERATION, or (): the link to send for votes on them, or on
            what runs in training wait for, is printed, too.
        json: a file that gets the address and what is shown, too; ``-`` prints that alone.

    Raises ConfigError for an argument, a missing folder, token or extra, DataError for checkpoints
    that cannot be compared, RunError if the address is taken.
    """
    # mend what is wrong before a port is taken
    if not folder.is_dir():
        raise ConfigError(f"view: {folder}: there is no such folder")
    if not 0 <= port <= 65_535:
        raise ConfigError(f"view: port: expected 0 to 65535, got {port}")
    uvicorn = import_uvicorn()
    family, address = listening_address(host, port)
    token, invitation = read_token(address[0], token_env), ""
    if vote_link is not None:
        invitation = make_link(folder, Booth(box), Links(box), vote_link)
    # listen only once the app is there, so that the first request is answered
    with contextlib.closing(bind(family, address)) as listener:
        forget(json)
        app = make_app(folder, box, token)
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        listener.listen(128)
        # the token itself is never printed
        note = f"/?token=... (that of {token_env})" if token else ""
        here, runs = url(listener), len(find_runs(folder))
        facts = {"url": here, "token": bool(token), "runs": runs, "votes": str(box)}
        said = f"{runs} runs at {here}{note}; votes go to {box}"
        if invitation:
            facts["vote_link"] = f"{here}{PATH}{invitation}"
            said += f"\nto send, for votes and nothing else: {facts['vote_link']}"
        announce(said, facts, json)
        # uvicorn would end the process by the signal; here the listener is closed first
        with no_exit_by_signal():
            server.run(sockets=[listener])
