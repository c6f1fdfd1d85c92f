"""What the servers of flowrl share: an address that others can reach needs a token, pages of other
sites are refused, connections are limited, and a server ends by itself."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flowrl.core.errors import ConfigError, RunError
from flowrl.core.files import delete, is_stdout, write_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

UVICORN: dict[str, Any] = {
    "http": "flowrl.core.connections:Connection",
    "lifespan": "off",
    "ws": "none",
    "log_config": None,
    "log_level": "warning",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 75,  # a client's connection is kept for its next iteration
}


def announce(text: str, facts: dict[str, Any], file: Path | None) -> None:
    """Say where a server is: a line of text, and the facts as JSON where a file is named; ``-``
    prints them alone, as one line. What it prints is there at once, also in a pipe."""
    if file is not None and is_stdout(file):
        print(json.dumps(facts), flush=True)
        return
    if file is not None:
        write_json(file, facts)
    print(text, flush=True)


def forget(file: Path | None) -> None:
    """Delete the file that an earlier server wrote its address to: a script waits for the new."""
    if file is not None and file.is_file() and not is_stdout(file):
        delete(file)


def read_token(address: str, token_env: str) -> bytes:
    """Return the token, empty for none. Raises ConfigError where the address needs one, or it is
    unset or unusable."""
    if not token_env:
        if not ipaddress.ip_address(address).is_loopback:
            raise ConfigError(
                f"serve: {address} can be reached from other machines: put a token into an "
                "environment variable and name that with --token-env, or stay on 127.0.0.1"
            )
        return b""
    token = os.environ.get(token_env, "")
    if len(token) < 8 or not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError(  # without the token itself: messages end in logs
            f"serve: the environment variable {token_env} should hold a token of 8 or more "
            "printable ASCII characters; "
            + ("it holds something else" if token else "it is unset or empty")
        )
    return token.encode()


def asked_here(request: Request) -> bool:
    """Say whether a request names this machine by a loopback name. A page from elsewhere may let
    its own name point here, and a browser then lets it read the answers, but not this one."""
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:  # such as [::1 without its end
        return False
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def from_another_page(request: Request) -> bool:
    """Say whether a browser asks for a page of another origin, by what browsers alone send: any
    page can make them ask this machine. A link that is followed, which has no effect, may come
    from anywhere."""
    site = request.headers.get("sec-fetch-site", "").lower()
    if site == "same-origin":  # also where a proxy has changed the host
        return False
    kind = [request.headers.get(f"sec-fetch-{name}", "") for name in ("mode", "dest")]
    if request.method in ("GET", "HEAD") and kind == ["navigate", "document"]:
        return False
    if site not in ("", "none"):
        return True
    origin = request.headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()
    except ValueError:
        return True


def is_json(request: Request) -> bool:
    """Say whether a request says that its body is JSON: a form of another page cannot."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"


def json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return an answer in ASCII: half of a surrogate pair, which JSON can write, is no UTF-8."""
    from starlette.responses import Response

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, "application/json")


def import_uvicorn() -> Any:
    """Import what serves the pages. Raises ConfigError."""
    try:
        import starlette.applications  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"serve: needs starlette and uvicorn: pip install starlette uvicorn ({error})"
        ) from error
    return uvicorn


def listening_address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Find the address to listen on. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"serve: no address to listen on: host {host!r}, port {port}: {error}"
        ) from error
    return family, address


def bind(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Take an address, and as many files as connections need; they are taken only once the socket
    listens. Raises RunError."""
    from flowrl.core.connections import raise_file_limit

    raise_file_limit()
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        where = f"{address[0]}, port {address[1]}"
        raise RunError(
            f"serve: cannot listen on {where}: {error}; choose another --host or --port"
        ) from error
    return listener


def url(listener: socket.socket) -> str:
    """Return the address of a listening socket."""
    name, number = listener.getsockname()[:2]
    if ":" in name:  # an address of IPv6
        name = f"[{name}]"
    return f"http://{name}:{number}"


@contextlib.contextmanager
def no_exit_by_signal() -> Iterator[None]:
    """Let the server end by itself: uvicorn raises the signal that stopped it again once all is
    answered."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
