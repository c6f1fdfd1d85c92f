"""``flowrl view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options

Runs = Annotated[Path, typer.Argument(metavar="RUNS", help="a folder with runs in or below it")]
Votes = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="gets the votes; default: RUNS/votes", callback=options.check_folder
    ),
]
Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="0 = a free one")]
TokenEnv = Annotated[
    str, typer.Option(metavar="NAME", help="environment variable with the viewers' token")
]


def view(
    runs: Runs = Path("runs"),
    *,
    votes: Votes = None,
    host: Host = "127.0.0.1",
    port: Port = 8322,
    token_env: TokenEnv = "",
    json: options.Json = None,
) -> None:
    """Look at runs in a browser while they train, and take blind votes on their images."""
    from flowrl.runs.view.server import serve_view

    box = votes or runs / "votes"
    serve_view(runs, box=box, host=host, port=port, token_env=token_env, json=json)
