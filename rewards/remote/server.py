"""Host the rewards of a config over HTTP: JSON and PNG, joined batches, a token off loopback,
metrics."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from flowrl.config.load import Config
from flowrl.core.abilities import LearnedReward
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.types import Reward

from .http import make_app
from .read_request import Limits
from .request_queue import RequestQueue

PORT = 8321
UVICORN: dict[str, Any] = {
    "lifespan": "off",
    "ws": "none",
    "log_config": None,
    "log_level": "warning",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 75,  # a client's connection is kept for its next iteration
}


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_env: str = "",
    max_mb: int = 256,
    max_images: int = 256,
    max_wait_ms: float = 5.0,
    batch: int = 64,
) -> None:
    """Host every reward of a config until SIGTERM or Ctrl-C; what is in flight then is answered
    first.

    Args:
        host: address to listen on; any but a loopback one needs a token.
        port: 0 takes a free one. The address is printed once requests are answered.
        token_env: name of the environment variable that holds the token which clients must send.
        max_mb, max_images: limits of one request (MiB of its body, images).
        max_wait_ms, batch: how long a request waits for others to join it, and up to how many
            images.

    Raises ConfigError for an argument, a missing token or the missing extra, RunError if the
    address is taken.
    """
    # the arguments
    _check(port, 0, 65_535, "port")
    for name, value in {"max_mb": max_mb, "max_images": max_images, "batch": batch}.items():
        _check(value, 1, 2**20, name)
    _check(max_wait_ms, 0, 60_000, "max_wait_ms")
    uvicorn = _import_uvicorn()
    # the address is taken before the rewards load
    family, address = _resolve(host, port)
    token = read_token(address[0], token_env)
    listener = _bind(family, address)
    with contextlib.closing(listener):
        rewards = load_rewards(config)
        queue = RequestQueue(rewards, batch=batch, max_wait_s=max_wait_ms / 1000)
        app = make_app(queue, Limits(bytes=max_mb * 2**20, images=max_images), token)
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        # listens before it says so
        listener.listen(1024)
        note = " (token needed)" if token else ""
        print(f"serving {', '.join(rewards)} at {_url(listener)}{note}", flush=True)
        with _no_exit_by_signal():
            server.run(sockets=[listener])
        queue.close(wait=not server.force_exit)
    print(f"stopped; {queue.counts.images} images were scored", flush=True)


def load_rewards(config: Config) -> dict[str, Reward]:
    """Make the rewards of a config. Raises ConfigError for one that learns, and what their `probe`
    raises."""
    rewards: dict[str, Reward] = {name: call.make() for name, call in config.rewards.items()}
    for name, reward in rewards.items():
        if isinstance(reward, LearnedReward):
            raise ConfigError(
                f"rewards.{name}: {config.rewards[name].fn} learns during training; it cannot be "
                "served"
            )
        probe = getattr(reward, "probe", None)
        if probe is not None:
            probe()
    return rewards


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


def _check(value: float, low: int, high: int, name: str) -> None:
    if not low <= value <= high:
        raise ConfigError(f"serve: {name}: expected {low} to {high}, got {value}")


def _import_uvicorn() -> Any:
    try:
        import starlette.applications  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f'serve: needs starlette and uvicorn: pip install "flowrl-diffusion[serve]" ({error})'
        ) from error
    return uvicorn


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"serve: no address to listen on: host {host!r}, port {port}: {error}"
        ) from error
    return family, address


def _bind(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Take the address before the rewards load; it takes connections only once they are ready."""
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


def _url(listener: socket.socket) -> str:
    name, number = listener.getsockname()[:2]
    return f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"


@contextlib.contextmanager
def _no_exit_by_signal() -> Iterator[None]:
    """Let the server end by itself: uvicorn raises the signal that stopped it again once all is
    answered."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
