"""``flowrl tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli import options
from flowrl.cli.compare import Nfe, Processes, Quiet
from flowrl.cli.output import show_or_write
from flowrl.core.errors import ConfigError

Try = Annotated[
    list[str],
    typer.Option(
        "--try",
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUES",
        help="values of a key of the config, parted by commas, or a range: "
        '"optimizer.lr=1e-5..1e-3 log"; repeatable',
        callback=options.check_overrides,
    ),
]
Trials = Annotated[int, typer.Option(help="0: all combinations of a grid, else 20")]
Sampler = Annotated[
    Literal["tpe", "random", "grid"] | None,
    typer.Option(help="default: grid where it is no more than --trials, else tpe"),
]
SamplerSeed = Annotated[int, typer.Option(help="seed that draws the trials")]
Pruner = Annotated[
    Literal["none", "median", "hyperband"],
    typer.Option(help="gives hopeless trials up by their evaluations at equal cost"),
]
Points = Annotated[
    int | None, typer.Option(help="held-out evaluations of a run; default: 1, with a pruner 4")
]
Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        show_default=False,
        help="a YAML file or the name of a shipped config",
        autocompletion=options.complete_config,
    ),
]
Seeds = Annotated[
    list[int],
    typer.Option(
        default_factory=lambda: [100],
        show_default="100",
        help="training seeds of each trial, a list: --seeds 0 1 2",
    ),
]
Out = Annotated[
    Path,
    typer.Option(help="folder of the study, its runs and files", callback=options.check_folder),
]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="train nothing; table and figures from --out again")
]


def tune(
    config: Config = "",
    *,
    tries: Try,
    trials: Trials = 0,
    sampler: Sampler = None,
    sampler_seed: SamplerSeed = 0,
    pruner: Pruner = "none",
    points: Points = None,
    seeds: Seeds,
    nfe: Nfe = 60000,
    changes: options.Set,
    profile: options.Profile = None,
    out: Out = Path("runs/tune"),
    report_only: ReportOnly = False,
    processes: Processes = 1,
    track: options.Track,
    quiet: Quiet = False,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Find the settings that serve a config best, with Optuna: trials on equal budgets.

    Train a config under settings that a sampler draws, judge each run on the config's held-out
    prompts.test, and write a table, figures and the best trial as a config. The same command goes
    on after a stop; with more trials it adds to what is there.
    """
    # imported when the command runs, so that --help need not load torch
    from flowrl.core.tables import text_table
    from flowrl.runs.compare.search_space import read_space
    from flowrl.runs.compare.tune import BEST, Tuning, read_tuning, run_tuning
    from flowrl.runs.compare.tune_report import tuning_notes, tuning_rows, write_tuning
    from flowrl.runs.trackers import trackers_given

    options.quiet_libraries()
    if bool(config) == report_only or (report_only and tries):
        raise ConfigError("tune: expected a CONFIG and --try, or --report-only without them")
    if report_only:
        result = read_tuning(out)
    else:
        if points is None:
            points = 1 if pruner == "none" else 4
        drawn = (trials, sampler, sampler_seed, pruner, points)
        given = options.fitted(config, changes, plugin, profile)
        more = (tuple(given), tuple(plugin), processes, None, trackers_given(track))
        what = Tuning(config, read_space(tries), tuple(seeds), nfe, out, *drawn, *more)
        result = run_tuning(what, quiet=quiet)
    # what is shown and written of it
    files = write_tuning(result, out)
    if result["best"] is not None and not report_only:
        files.append(out / BEST)

    def said(width: int | None) -> str:
        table = text_table(tuning_rows(result), left=1, width=width)
        return "\n".join([table, *tuning_notes(result), *map(str, files)])

    show_or_write(said, result, json)
