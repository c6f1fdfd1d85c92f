"""``flowrl new``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write

Kind = Annotated[
    Literal["method", "reward", "config", "model", "part"],
    typer.Argument(metavar="KIND", help="method, reward, config, model or part"),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="of the file, such as my_reward")]
Folder = Annotated[
    Path, typer.Option(help="gets the files", callback=options.check_folder, show_default="here")
]
Base = Annotated[
    str,
    typer.Option(
        metavar="CONFIG",
        help="of a method or a config: the one that is copied",
        autocompletion=options.complete_config,
    ),
]


def new(
    kind: Kind,
    name: Name,
    *,
    folder: Folder = Path("."),
    base: Base = options.DEFAULT,
    json: options.Json = None,
) -> None:
    """Begin a method, a reward, a config, a model or a part of your own: a file and its test.

    Each is whole, runs at once, and lies outside of the package.
    """
    from flowrl.runs.stubs import write_stub

    made = write_stub(kind, name, folder, base=base)
    commands = [shlex.join(made.test), shlex.join([*made.train, "--rehearse"])]
    commands.append(shlex.join(made.train))
    where = "" if folder == Path(".") else f" in {folder}"
    lines = [*map(str, made.files), f"then{where}:", *(f"  {each}" for each in commands)]
    facts = {"files": [f"{file}" for file in made.files], "commands": commands}
    show_or_write("\n".join(lines), facts, json)
