"""``flowrl pairs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write

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
    from flowrl.evaluation.preference_pairs import convert_pairs

    done = convert_pairs(source, out, drop=drop)
    lines = [f"left out: {reason}" for reason in done.dropped[:5]]
    bad = len(done.dropped)
    more = f", {done.unlabelled} without a vote" if done.unlabelled else ""
    lines.append(f"{done.kept} pairs in {done.file}; left out {done.ties} ties{more}, {bad} bad")
    show_or_write("\n".join(lines), {**done._asdict(), "file": f"{done.file}"}, json)
