"""``flowrl grid``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def grid(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    *,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="default: RUN/grid.png")] = None,
    columns: Annotated[int, typer.Option(help="checkpoints shown at most")] = 8,
) -> None:
    """Draw a run's checkpoints side by side."""
    from flowrl.core.files import is_stdout
    from flowrl.evaluation.image_grids import save_png
    from flowrl.runs.folder import GRID
    from flowrl.runs.report.run_grid import run_grid

    file = out or run / GRID
    save_png(run_grid(run, max_columns=columns), file)
    if not is_stdout(file):
        print(file)
