"""``flowrl grid``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import refuse_both, show_or_write


def grid(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    *,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="default: RUN/grid.png")] = None,
    columns: Annotated[int, typer.Option(help="checkpoints shown at most")] = 8,
    json: options.Json = None,
) -> None:
    """Draw a run's checkpoints side by side."""
    from flowrl.core.files import is_stdout
    from flowrl.evaluation.image_grids import page_format, save_page
    from flowrl.runs.folder import GRID, read_verdicts
    from flowrl.runs.report.run_grid import evenly_spaced, run_grid, sample_files

    file = out or run / GRID
    refuse_both(out, json)
    page_format(file)
    save_page(run_grid(run, max_columns=columns), file)
    shown, judged = evenly_spaced(sorted(sample_files(run)), columns), read_verdicts(run)
    right = {iteration: judged[iteration] for iteration in shown if iteration in judged}
    facts = {"grid": f"{file}", "iterations": shown, "right": right}
    show_or_write(f"{file}", facts, json, silent=is_stdout(file))
