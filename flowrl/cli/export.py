"""``flowrl export``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write, working

FORMATS = ["lora", "peft", "kohya", "merged"]


Run = Annotated[Path, typer.Argument(metavar="RUN", help="a run, or a checkpoint of one")]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="new or empty; default: RUN/export",
        callback=options.check_folder,
    ),
]
Formats = Annotated[
    list[str],
    typer.Option(
        "--format",
        default_factory=list,
        show_default=False,
        metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; repeatable; default: lora, without LoRA merged",
        autocompletion=lambda: FORMATS,
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="auto rounds nothing"),
]
Weights = Annotated[
    Literal["ema", "current"] | None, typer.Option(help="default: the run's eval.weights")
]
BaseModel = Annotated[
    str, typer.Option(metavar="ID", help="hub id of a base model that was in a folder")
]


def export(
    run: Run,
    *,
    out: Out = None,
    formats: Formats,
    dtype: Dtype = "auto",
    weights: Weights = None,
    iteration: options.Iteration = None,
    base_model: BaseModel = "",
    changes: options.Set,
    profile: options.Profile = None,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Write a run's weights for other programs, with a model card."""
    # imported when the command runs, so that --help need not load torch
    from flowrl.runs.export.export import export as write_export
    from flowrl.runs.folder import EXPORT
    from flowrl.runs.gain import base_is_best
    from flowrl.runs.open_run import run_of

    options.quiet_libraries()
    folder = out or run_of(run) / EXPORT
    plugin = options.allowed(run, plugin)
    with working(f"writing {folder}"):
        files = write_export(
            run,
            folder,
            formats=formats,
            weights=weights,
            iteration=iteration,
            dtype=dtype,
            base_model=base_model,
            overrides=options.fitted_target(f"{run}", "", changes, plugin, profile),
            plugins=plugin,
        )
    if nothing := base_is_best(run_of(run)):
        print(nothing, file=sys.stderr)
    paths = [f"{folder / name}" for name in files]
    show_or_write("\n".join(paths), {"folder": f"{folder}", "files": files}, json)
