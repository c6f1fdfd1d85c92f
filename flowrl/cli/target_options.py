"""The arguments of ``flowrl eval`` and ``flowrl sample``: which model, and with what settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowrl.cli import options

if TYPE_CHECKING:
    from flowrl.runs.target import Target

Name = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="a run, a checkpoint, a diffusers model folder, or a config (its base model)",
        autocompletion=options.complete_config,
    ),
]
Settings = Annotated[
    str,
    typer.Option(
        "--config",
        help="settings for a bare model folder",
        autocompletion=options.complete_config,
    ),
]
Weights = Annotated[
    Literal["ema", "current", "base"] | None,
    typer.Option(help="of a run; default: its eval.weights"),
]
Iteration = Annotated[
    str | None,
    typer.Option(
        metavar="N|best|last",
        help="of a run: the checkpoint to take; default: the best by held-out score",
        autocompletion=lambda: ["best", "last"],
    ),
]
Steps = Annotated[int | None, typer.Option(help="denoising steps")]
Seed = Annotated[int | None, typer.Option(help="of the initial noise")]


def opened(
    target: str,
    settings: str,
    weights: str | None,
    iteration: str | None,
    changes: dict[str, int | str | None],
    overrides: list[str],
    plugins: list[str],
) -> Target:
    """Load a target; `changes` are settings that have an option of their own, None = as they
    are."""
    from flowrl.runs.target import open_target

    options.quiet_libraries()
    more = [f"{key}={value}" for key, value in changes.items() if value is not None]
    return open_target(
        target,
        settings=settings,
        weights=weights,
        iteration=iteration,
        overrides=[*overrides, *more],
        plugins=plugins,
    )
