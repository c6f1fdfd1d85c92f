"""``flowrl methods``."""

from __future__ import annotations

from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, show_or_write


def methods(
    *,
    cost: Annotated[
        bool, typer.Option("--cost", help="add network calls per image; loads every config")
    ] = False,
    json: options.Json = None,
) -> None:
    """List the methods: paper, status, axes, configs; what they cost."""
    from flowrl.runs.catalogue import describe_method, load_methods, methods_table

    rows, known = [], load_methods()
    for number, method in enumerate(known, 1):
        rows.append(describe_method(method, cost=cost))
        if cost:
            count_up(number, len(known), "methods")
    show_or_write(lambda width: methods_table(rows, width=width), rows, json)
