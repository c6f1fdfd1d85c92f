"""``flowrl configs`` and ``flowrl schema``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import print_text, show_or_write
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
    json: options.Json = None,
) -> None:
    """List the shipped configs, or print one as it is."""
    from flowrl.core.shipped_files import config_file, list_configs

    if name is None:
        show_or_write("\n".join(list_configs()), list_configs(), json)
    elif json is not None:
        raise ConfigError("--json lists the configs: leave out the name")
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
