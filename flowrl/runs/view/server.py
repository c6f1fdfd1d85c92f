"""Serve the pages of `flowrl view` until Ctrl-C."""

from __future__ import annotations

import contextlib
from pathlib import Path

from flowrl.core.errors import ConfigError
from flowrl.core.local_server import (
    UVICORN,
    announce,
    bind,
    forget,
    import_uvicorn,
    listening_address,
    no_exit_by_signal,
    read_token,
    url,
)
from flowrl.runs.view.app import make_app
from flowrl.runs.view.listing import find_runs

PORT = 8322


def serve_view(
    folder: Path,
    *,
    box: Path,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_env: str = "",
    json: Path | None = None,
) -> None:
    """Show the runs below a folder, and take votes into `box`, until SIGTERM or Ctrl-C.

    Args:
        host: address to listen on; any but a loopback one needs a token.
        port: 0 takes a free one. The address is printed once requests are answered.
        token_env: name of the environment variable with the token.
        json: a file that gets the address and what is shown, too; ``-`` prints that alone.

    Raises ConfigError for an argument, a missing folder, token or extra, RunError if the address is
    taken.
    """
    # mend what is wrong before a port is taken
    if not folder.is_dir():
        raise ConfigError(f"view: {folder}: there is no such folder")
    if not 0 <= port <= 65_535:
        raise ConfigError(f"view: port: expected 0 to 65535, got {port}")
    uvicorn = import_uvicorn()
    family, address = listening_address(host, port)
    token = read_token(address[0], token_env)
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
        announce(f"{runs} runs at {here}{note}; votes go to {box}", facts, json)
        # uvicorn would end the process by the signal; here the listener is closed first
        with no_exit_by_signal():
            server.run(sockets=[listener])
