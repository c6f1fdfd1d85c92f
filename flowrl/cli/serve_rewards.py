"""``flowrl serve-rewards``: the one place outside of rewards/ that knows the reward server."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli import options

Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="0 = a free one")]
TokenEnv = Annotated[
    str, typer.Option(metavar="NAME", help="environment variable with the clients' token")
]
MaxMb = Annotated[int, typer.Option(help="MiB of one request")]
MaxImages = Annotated[int, typer.Option(help="images of one request")]
MaxHeldMb = Annotated[int, typer.Option(help="MiB of decoded images of all requests in hand")]
MaxWaitMs = Annotated[float, typer.Option(help="wait for others to join")]
Batch = Annotated[int, typer.Option(help="join requests up to N images")]


def serve_rewards(
    config: options.ConfigName,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    token_env: TokenEnv = "",
    max_mb: MaxMb = 256,
    max_images: MaxImages = 256,
    max_held_mb: MaxHeldMb = 3072,
    max_wait_ms: MaxWaitMs = 5.0,
    batch: Batch = 64,
    profile: options.Profile = None,
    plugin: options.Plugins,
    json: options.Json = None,
) -> None:
    """Host a config's rewards over HTTP; nothing else of the config is used."""
    from flowrl.core.shipped_files import import_rewards

    import_rewards("remote.server").serve(
        options.load_fitted(config, [*overrides, *changes], plugin, profile),
        host=host,
        port=port,
        token_env=token_env,
        max_mb=max_mb,
        max_images=max_images,
        max_held_mb=max_held_mb,
        max_wait_ms=max_wait_ms,
        batch=batch,
        json=json,
    )
