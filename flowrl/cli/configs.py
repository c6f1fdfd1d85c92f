"""What a run begins with: ``flowrl configs``, ``methods``, ``schema``, ``new``, ``tiny`` and
``pairs``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, print_text, show_or_write
from flowrl.core.errors import ConfigError


def configs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="print this one: flowrl configs shapes/vgpo > my.yaml",
            autocompletion=options.complete_config,
        ),
    ] = None,
    *,
    model: options.Model = None,
    json: options.Json = None,
) -> None:
    """List the shipped configs, or print one as it is, or its method on another model."""
    from flowrl.core.shipped_files import config_file, list_configs

    if model is not None and name is None:
        raise ConfigError("--model: name a method or a config: flowrl configs awm --model NAME")
    if name is None:
        show_or_write("\n".join(list_configs()), list_configs(), json)
    elif json is not None:
        raise ConfigError("--json lists the configs: leave out the name")
    elif model is not None:
        from flowrl.runs.composed import composed

        print(composed(name, model).text(), end="")
    else:
        print(config_file(name).read_text(encoding="utf-8"), end="")


def schema(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write it there; default: print it")
    ] = None,
) -> None:
    """Print the JSON schema of a config, which lets an editor complete its keys."""
    from flowrl.config.schema import config_schema as schema_of
    from flowrl.core.files import is_stdout, json_text, write_json

    if out is None or is_stdout(out):
        print(json_text(schema_of()))
    else:
        write_json(out, schema_of())
        print_text(f"written: {out}")


def methods(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            default_factory=list,
            show_default=False,
            help="methods of which all is shown, such as awm; default: a short table of all",
        ),
    ],
    *,
    cost: Annotated[
        bool, typer.Option("--cost", help="add network calls per image; loads every config")
    ] = False,
    json: options.Json = None,
) -> None:
    """List the methods: paper, status, how far tried; configs, axes and what they cost."""
    from flowrl.runs.catalogue import describe_method, find_methods, methods_in_full, methods_table

    rows, known = [], find_methods(names)
    for number, method in enumerate(known):
        if cost:
            count_up(number, len(known), "methods")
        rows.append(describe_method(method, cost=cost))
    if cost:
        count_up(len(known), len(known), "methods")
    drawn = methods_in_full if names else methods_table
    show_or_write(lambda width: drawn(rows, width=width), rows, json)


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
    from flowrl.config.axes import functions_of
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
    from flowrl.evaluation.preference_pairs import (
        convert_pairs,
    )

    done = convert_pairs(source, out, drop=drop)
    lines = [f"left out: {reason}" for reason in done.dropped[:5]]
    bad = len(done.dropped)
    more = f", {done.unlabelled} without a vote" if done.unlabelled else ""
    lines.append(f"{done.kept} pairs in {done.file}; left out {done.ties} ties{more}, {bad} bad")
    show_or_write("\n".join(lines), {**done._asdict(), "file": f"{done.file}"}, json)
