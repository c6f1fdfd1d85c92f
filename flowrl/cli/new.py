"""``flowrl new``, ``flowrl tiny`` and ``flowrl pairs``: files to begin with."""

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


def complete_tiny() -> list[str]:
    """Complete the name of a tiny pipeline."""
    from flowrl.models.tiny import tinies

    return list(tinies())


TinyName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="as adapters are named, or variants of them",
        autocompletion=complete_tiny,
    ),
]
NewFolder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="new or empty", callback=options.check_folder),
]
Seed = Annotated[int, typer.Option(help="of the random weights")]


def tiny(
    name: TinyName,
    folder: NewFolder,
    *,
    plugin: options.Plugins,
    seed: Seed = 0,
    json: options.Json = None,
) -> None:
    """Write a tiny random pipeline of the real diffusers classes, to rehearse with on a CPU.

    It needs no download, and the same seed gives the same weights. Its tokenizers know letters
    alone; images of 64 pixels and videos of 5 frames are enough for it.
    """
    from flowrl.config.functions import functions_of
    from flowrl.models.tiny import save_tiny

    options.quiet_libraries()
    for each in plugin:  # adapters of the user's
        functions_of(each, "--plugin", each)
    save_tiny(name, folder, seed=seed)
    sizes = "image.height=64 image.width=64"
    said = f"{folder}\nuse it: model.path={folder} {sizes}"
    show_or_write(said, {"folder": f"{folder}", "name": name, "seed": seed}, json)


Source = Annotated[
    Path,
    typer.Argument(metavar="SOURCE", help="Pick-a-Pic's parquet, HPD's JSON, or a folder"),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER", help="gets pairs.jsonl and images/", callback=options.check_folder
    ),
]
Drop = Annotated[bool, typer.Option("--drop", help="leave bad pairs out instead of stopping")]


def pairs(source: Source, *, out: Out, drop: Drop = False, json: options.Json = None) -> None:
    """Turn preference data into a list of pairs to train on."""
    from flowrl.evaluation.pair_formats import convert_pairs

    done = convert_pairs(source, out, drop=drop)
    lines = [f"left out: {reason}" for reason in done.dropped[:5]]
    bad = len(done.dropped)
    more = f", {done.unlabelled} without a vote" if done.unlabelled else ""
    lines.append(f"{done.kept} pairs in {done.file}; left out {done.ties} ties{more}, {bad} bad")
    show_or_write("\n".join(lines), {**done._asdict(), "file": f"{done.file}"}, json)
