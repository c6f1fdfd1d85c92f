"""``flowrl pairs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    Path,
    typer.Argument(metavar="SOURCE", help="Pick-a-Pic's parquet, HPD's JSON, or a folder"),
]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="gets pairs.jsonl and images/")]
Drop = Annotated[bool, typer.Option("--drop", help="leave bad pairs out instead of stopping")]


def pairs(source: Source, *, out: Out, drop: Drop = False) -> None:
    """Turn preference data into a list of pairs to train on."""
    from flowrl.evaluation.pair_formats import convert_pairs

    done = convert_pairs(source, out, drop=drop)
    for reason in done.dropped[:5]:
        print(f"left out: {reason}")
    print(f"{done.kept} pairs in {done.file}; left out {done.ties} ties, {len(done.dropped)} bad")
