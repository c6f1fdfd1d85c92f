"""``flowrl report``, ``flowrl grid`` and ``flowrl view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import options
from flowrl.cli.output import refuse_both, show_or_write
from flowrl.core.errors import RunError

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="run folders, shown side by side")
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="HTML", help="default: RUN/report.html, of several ./report.html"),
]


Folder = Annotated[Path, typer.Argument(metavar="RUNS", help="a folder with runs in or below it")]
Votes = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="gets the votes; default: RUNS/votes", callback=options.check_folder
    ),
]
Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="0 = a free one")]
VoteLink = Annotated[
    str | None,
    typer.Option(
        metavar="RUN@N,RUN@N",
        help="print a link to send that opens the blind vote on these two checkpoints and nothing "
        "else; waiting: on what runs in training ask",
    ),
]
TokenEnv = Annotated[
    str, typer.Option(metavar="NAME", help="environment variable with the viewers' token")
]


def report(runs: Runs, *, out: Out = None, json: options.Json = None) -> None:
    """Tell runs on one HTML page that opens offline: scores, samples, curves, findings, configs."""
    from flowrl.core.files import is_stdout, write_text
    from flowrl.runs.folder import REPORT, SUMMARY, read_object
    from flowrl.runs.report.page import html_report

    refuse_both(out, json)
    file = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    write_text(file, html_report(*runs, show_damaged=True))
    summaries: dict[str, Any] = {}
    for run in runs:
        # one that is damaged is told on the page; here, too
        try:
            summaries[f"{run}"] = read_object(run, SUMMARY)
        except RunError as error:
            summaries[f"{run}"] = {"damaged": f"{error}"}
    silent = is_stdout(file)
    show_or_write(f"{file}", {"page": f"{file}", "runs": summaries}, json, silent=silent)


def grid(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    *,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="default: RUN/grid.png")] = None,
    json: options.Json = None,
) -> None:
    """Draw a run's checkpoints side by side."""
    from flowrl.core.files import is_stdout
    from flowrl.evaluation.image_grids import page_format, save_page
    from flowrl.runs.folder import GRID, read_verdicts
    from flowrl.runs.report.samples import COLUMNS, evenly, run_grid, sample_files

    file = out or run / GRID
    refuse_both(out, json)
    page_format(file)
    save_page(run_grid(run), file)
    shown, judged = evenly(sorted(sample_files(run)), COLUMNS), read_verdicts(run)
    right = {iteration: judged[iteration] for iteration in shown if iteration in judged}
    facts = {"grid": f"{file}", "iterations": shown, "right": right}
    show_or_write(f"{file}", facts, json, silent=is_stdout(file))


def view(
    runs: Folder = Path("runs"),
    *,
    votes: Votes = None,
    host: Host = "127.0.0.1",
    port: Port = 8322,
    token_env: TokenEnv = "",
    vote_link: VoteLink = None,
    json: options.Json = None,
) -> None:
    """Look at runs in a browser while they train, and take blind votes on their images."""
    from flowrl.runs.view.app import serve_view

    box = votes or runs / "votes"
    where: dict[str, Any] = {"host": host, "port": port, "token_env": token_env, "json": json}
    serve_view(runs, box=box, vote_link=_about(vote_link), **where)


def _about(vote_link: str | None) -> tuple[str, ...] | None:
    """Return what a link is about: two checkpoints, or () for what waits. Raise BadParameter."""
    if vote_link is None or vote_link == "waiting":
        return None if vote_link is None else ()
    found = tuple(name.strip() for name in vote_link.split(","))
    if len(found) != 2:
        raise typer.BadParameter(f"--vote-link: expected RUN@N,RUN@N or waiting, got {vote_link}")
    return found
