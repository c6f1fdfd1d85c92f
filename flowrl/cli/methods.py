"""``flowrl methods``."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write


def methods(
    *,
    cost: Annotated[
        bool, typer.Option("--cost", help="add network calls per image; loads every config")
    ] = False,
    json: options.Json = None,
) -> None:
    """List the methods: paper, status, axes, configs; what they cost."""
    from flowrl.runs.catalogue import describe, load_methods, table

    rows = [describe(method, cost=cost) for method in load_methods()]
    show_or_write(lambda width: table(rows, width=width), rows, json)
