"""``flowrl compare`` and ``flowrl tune``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write
from flowrl.core.errors import ConfigError

Configs = Annotated[
    list[str],
    typer.Argument(
        default_factory=list,
        show_default=False,
        metavar="CONFIG",
        help="YAML files or names of shipped configs",
        autocompletion=options.complete_config,
    ),
]
Seeds = Annotated[
    list[int],
    typer.Option(
        default_factory=lambda: [0, 1, 2],
        show_default="0 1 2",
        help="training seeds, a list: --seeds 0 1 2",
    ),
]
Nfe = Annotated[
    float, typer.Option(help="network evaluations of a run, per latent; a trained state counts 3")
]
Seconds = Annotated[float, typer.Option(help="seconds of training of a run; 0: no budget of time")]
Points = Annotated[int, typer.Option(help="held-out evaluations of a run")]
LrSearch = Annotated[
    list[float],
    typer.Option(
        default_factory=list,
        show_default=False,
        metavar="FACTOR...",
        help="first try optimizer.lr times these",
    ),
]
SearchSeed = Annotated[int, typer.Option(help="of the search, none of --seeds")]
SearchShare = Annotated[float, typer.Option(help="of --nfe for a try")]
SearchPrompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="held-out prompts that choose the rate; default: the training images do",
    ),
]
SearchImages = Annotated[
    int, typer.Option(min=0, help="of each of --search-prompts; 0: as many as eval.images")
]
Suite = Annotated[
    str | None,
    typer.Option(
        help="judge by a suite's headline and prompts: shapes, geneval, ocr ...; default: by the "
        "configs' own"
    ),
]
Prompts = Annotated[
    str | None, typer.Option(metavar="FILE", help="of --suite, in place of its own prompts")
]
Runs = Annotated[Path, typer.Option(help="folder of the runs", callback=options.check_folder)]
Out = Annotated[Path, typer.Option(help="the result file, .json", callback=options.check_result)]
Figures = Annotated[
    Path | None,
    typer.Option(
        help="folder of the figures; default: beside the result file",
        callback=options.check_folder,
    ),
]
ReportOnly = Annotated[
    bool,
    typer.Option("--report-only", help="train nothing; tables and figures from --out again"),
]
Processes = Annotated[
    int,
    typer.Option(help="runs at the same time, shared out to all GPUs; needs --seconds 0"),
]


def compare(
    configs: Configs,
    *,
    seeds: Seeds,
    nfe: Nfe = 60000,
    seconds: Seconds = 90,
    points: Points = 2,
    lr_search: LrSearch,
    search_seed: SearchSeed = 100,
    search_share: SearchShare = 0.5,
    search_prompts: SearchPrompts = "",
    search_images: SearchImages = 0,
    suite: Suite = None,
    prompts: Prompts = None,
    changes: options.Set,
    profile: options.Profile = None,
    runs: Runs = Path("runs/compare"),
    out: Out = Path("runs/compare/result.json"),
    figures: Figures = None,
    report_only: ReportOnly = False,
    processes: Processes = 1,
    track: options.Track,
    quiet: options.Quiet = False,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Compare configs on equal budgets.

    Train configs x seeds until each run has used up a budget of network evaluations and one of
    seconds, judge them on the same held-out prompts, and write a result file, tables and figures.
    The same command goes on after a stop; with more configs or seeds it adds to what is there.
    """
    from flowrl.runs.compare import compare as room
    from flowrl.runs.compare.budgets import Budgets
    from flowrl.runs.compare.tables import terminal
    from flowrl.runs.trackers import trackers_given

    options.quiet_libraries()
    _check_configs(configs, report_only=report_only)
    given = [*_judge(suite, prompts), *changes]
    changes = options.fitted_alike(configs, given, plugin, profile)
    # a result, made or read
    if report_only:
        result = room.saved_result(out)
    else:
        budgets = Budgets(nfe, seconds, points)
        search = None
        if lr_search:
            chosen_by = (search_prompts, search_images)
            search = room.Search(tuple(lr_search), search_seed, search_share, *chosen_by)
        what = room.Comparison(tuple(configs), tuple(seeds), budgets, runs, out, search)
        more: dict[str, Any] = {"overrides": tuple(changes), "plugins": tuple(plugin)}
        more |= {"processes": processes, "track": trackers_given(track)}
        result = room.run_comparison(what._replace(**more), quiet=quiet)
    # what is shown and written of it
    show_or_write(lambda width: terminal(result, width=width), result, json)
    _name(room.write_comparison(result, out, figures or out.parent, runs), json)


def _name(files: Sequence[Path], json: Path | None) -> None:
    """Print the files that were written, unless JSON alone is printed."""
    from flowrl.core.files import is_stdout

    if json is None or not is_stdout(json):
        print("\n".join(map(str, files)))


def _check_configs(configs: list[str], *, report_only: bool) -> None:
    """Raise ConfigError if configs were given to a report, or none to a comparison."""
    if configs and report_only:
        raise ConfigError(
            f"--report-only reads --out alone: leave out the configs, {', '.join(configs)}"
        )
    if not configs and not report_only:
        raise ConfigError(
            "compare: expected configs, or --report-only; `flowrl configs` lists the shipped ones"
        )


def _judge(suite: str | None, prompts: str | None) -> list[str]:
    """Return the overrides that judge by a suite's headline. Raises ConfigError."""
    from flowrl.evaluation.suites.catalogue import headline_of

    if suite is not None:
        return headline_of(suite, prompts)
    if prompts is not None:
        raise ConfigError("--prompts belongs to --suite NAME")
    return []


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
TunedPoints = Annotated[
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
TunedSeeds = Annotated[
    list[int],
    typer.Option(
        default_factory=lambda: [100],
        show_default="100",
        help="training seeds of each trial, a list: --seeds 0 1 2",
    ),
]
StudyFolder = Annotated[
    Path,
    typer.Option(help="folder of the study, its runs and files", callback=options.check_folder),
]


def tune(
    config: Config = "",
    *,
    tries: Try,
    trials: Trials = 0,
    sampler: Sampler = None,
    sampler_seed: SamplerSeed = 0,
    pruner: Pruner = "none",
    points: TunedPoints = None,
    seeds: TunedSeeds,
    nfe: Nfe = 60000,
    changes: options.Set,
    profile: options.Profile = None,
    out: StudyFolder = Path("runs/tune"),
    report_only: ReportOnly = False,
    processes: Processes = 1,
    track: options.Track,
    quiet: options.Quiet = False,
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
