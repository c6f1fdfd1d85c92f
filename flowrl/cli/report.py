"""``flowrl report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.output import refuse_both, show_or_write

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="run folders, shown side by side")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="HTML", help="default: RUN/report.html, of several ./report.html"),
]


def report(runs: Runs, *, out: Out = None, json: options.Json = None) -> None:
    """Tell runs on one HTML page that opens offline: scores, samples, curves, findings, configs."""
    from flowrl.core.files import is_stdout, write_text
    from flowrl.runs.folder import REPORT, SUMMARY, read_object
    from flowrl.runs.report.page import html_report

    refuse_both(out, json)
    file = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    write_text(file, html_report(*runs))
    summaries = {f"{run}": read_object(run, SUMMARY) for run in runs}
    silent = is_stdout(file)
    show_or_write(f"{file}", {"page": f"{file}", "runs": summaries}, json, silent=silent)
