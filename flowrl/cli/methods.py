"""``flowrl methods``."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, show_or_write


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
    configs: Annotated[
        bool, typer.Option("--configs", help="show each config and its axes, of all methods")
    ] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="add network calls per image; loads every config")
    ] = False,
    json: options.Json = None,
) -> None:
    """List the methods: paper, status, how far tried; configs, axes and what they cost."""
    from flowrl.runs.catalogue import describe_method, find_methods
    from flowrl.runs.method_tables import methods_in_full, methods_table

    rows, known = [], find_methods(names)
    for number, method in enumerate(known):
        if cost:
            count_up(number, len(known), "methods")
        rows.append(describe_method(method, cost=cost))
    if cost:
        count_up(len(known), len(known), "methods")
    drawn = methods_in_full if names or configs else methods_table
    show_or_write(lambda width: drawn(rows, width=width), rows, json)
