"""``flowrl tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli import options
from flowrl.cli.compare import Count, Nfe, Out, Processes, Quiet, Runs
from flowrl.cli.output import show_or_write
from flowrl.core.errors import ConfigError

Try = Annotated[
    list[str],
    typer.Option(
        "--try",
        default_factory=list,
        show_default=False,
        metavar="KEY=VALUE,VALUE...",
        help="values of a key of the config; repeatable: all combinations are tried",
        callback=options.check_overrides,
    ),
]
Trials = Annotated[
    int, typer.Option(help="at most so many of all combinations, drawn by chance; 0: all")
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
        help="training seeds, a list: --seeds 0 1 2",
    ),
]
Draw = Annotated[int, typer.Option(help="seed that draws the trials")]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="train nothing; table and figure from --out again")
]


def tune(
    config: Config = "",
    *,
    tries: Try,
    trials: Trials = 0,
    seeds: Seeds,
    draw: Draw = 0,
    nfe: Nfe = 60000,
    count: Count = "cost",
    changes: options.Set,
    runs: Runs = Path("runs/tune"),
    out: Out = Path("runs/tune/result.json"),
    report_only: ReportOnly = False,
    processes: Processes = 1,
    quiet: Quiet = False,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Find the settings that serve a config best: trials on equal budgets, on held-out prompts.

    Train a config under every combination of values, or some of them, judge each run on the
    config's prompts.test, and write a table, a figure and the best one as a config. The same
    command goes on after a stop; with more values it adds to what is there.
    """
    # imported when the command runs, so that --help need not load torch
    from flowrl.core.tables import text_table
    from flowrl.runs.compare.tuning import Tuning, run_tuning
    from flowrl.runs.compare.tuning_file import read_tuning
    from flowrl.runs.compare.tuning_report import tuning_notes, tuning_rows, write_tuning

    options.quiet_libraries()
    if bool(config) == report_only or (report_only and tries):
        raise ConfigError("tune: expected a CONFIG and --try, or --report-only without them")
    files = list[Path]()
    if report_only:
        result = read_tuning(out)
    else:
        choices, limits = read_choices(tries), (trials, draw, count)
        more = (tuple(changes), tuple(plugin), processes)
        what = Tuning(config, choices, tuple(seeds), nfe, runs, out, *limits, *more)
        result = run_tuning(what, quiet=quiet)
        files += [what.best] if result["best"] is not None else []
    # what is shown and written of it
    files = [*write_tuning(result, out), *files]

    def said(width: int | None) -> str:
        table = text_table(tuning_rows(result), left=1, width=width)
        return "\n".join([table, *tuning_notes(result), *map(str, files)])

    show_or_write(said, result, json)


def read_choices(texts: list[str]) -> dict[str, list[str]]:
    """Read "optimizer.lr=1e-4,5e-4" -> key: values. Commas inside brackets and quotes do not part.

    Raises ConfigError for a key that comes twice, an empty value, or a bracket or quote that is
    left open.
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if key in choices:
            raise ConfigError(f"--try {key}: comes twice; give its values once, parted by commas")
        choices[key] = _parted(values, key)
    return choices


def _parted(text: str, key: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
        if depth < 0:
            break
    if depth or quote:
        raise ConfigError(f"--try {key}: a bracket or quote has no partner in {text!r}")
    values = [part.strip() for part in parts]
    if "" in values:
        raise ConfigError(f"--try {key}: expected values parted by commas, got {text!r}")
    return values
