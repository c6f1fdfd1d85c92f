"""``flowrl tiny``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write


def complete_tiny() -> list[str]:
    """Complete the name of a tiny pipeline."""
    from flowrl.models.tiny import tinies

    return list(tinies())


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="as adapters are named, or variants of them",
        autocompletion=complete_tiny,
    ),
]
Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="new or empty", callback=options.check_folder),
]
Seed = Annotated[int, typer.Option(help="of the random weights")]


def tiny(
    name: Name,
    folder: Folder,
    *,
    plugin: options.Plugins,
    seed: Seed = 0,
    json: options.Json = None,
) -> None:
    """Write a tiny random pipeline of the real diffusers classes, to rehearse with on a CPU.

    It needs no download, and the same seed gives the same weights. Its tokenizers know letters
    alone; images of 64 pixels and videos of 5 frames are enough for it.
    """
    from flowrl.config.axes import functions_of
    from flowrl.models.tiny import save_tiny

    options.quiet_libraries()
    for each in plugin:  # adapters of the user's
        functions_of(each, "--plugin", each)
    save_tiny(name, folder, seed=seed)
    sizes = "image.height=64 image.width=64"
    said = f"{folder}\nuse it: model.path={folder} {sizes}"
    show_or_write(said, {"folder": f"{folder}", "name": name, "seed": seed}, json)
