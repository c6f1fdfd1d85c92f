"""``flowrl configs``, ``flowrl methods`` and ``flowrl schema``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

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
    from flowrl.core.files import is_stdout, write_json

    if out is None or is_stdout(out):
        print(json_module.dumps(schema_of(), indent=2))
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
