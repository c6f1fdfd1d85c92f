"""``flowrl tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli import options
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
Trials = Annotated[int, typer.Option(help="of all combinations, drawn by chance; 0: all")]
Seeds = Annotated[
    list[int],
    typer.Option(default_factory=lambda: [100], show_default="100", help="of training, several"),
]
Draw = Annotated[int, typer.Option(help="seed that draws the trials")]
Nfe = Annotated[float, typer.Option(help="network evaluations of a run, per latent")]
Count = Annotated[
    Literal["cost", "calls"],
    typer.Option(
        help="what --nfe counts: with decoding, rewards and training at their measured cost, or "
        "calls of the network alone"
    ),
]
Runs = Annotated[Path, typer.Option(help="folder of the runs", callback=options.check_folder)]
Out = Annotated[Path, typer.Option(help="the result file", callback=options.check_result)]
ReportOnly = Annotated[
    bool, typer.Option("--report-only", help="train nothing; table and figure from --out again")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]


def tune(
    config: options.ConfigName,
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
    from flowrl.runs.compare import tuning
    from flowrl.runs.compare.tuning_report import tuning_notes, tuning_rows, write_tuning

    options.quiet_libraries()
    if report_only:
        result = tuning.read_tuning(out)
    else:
        settings = tuning.Tuning(
            config=config,
            choices=read_choices(tries),
            seeds=tuple(seeds),
            nfe=nfe,
            runs=runs,
            out=out,
            trials=trials,
            draw=draw,
            counted=count,
            overrides=tuple(changes),
            plugins=tuple(plugin),
        )
        result = tuning.run_tuning(settings, quiet=quiet)
    # what is shown and written of it
    files = [*write_tuning(result, out)]
    files += [out.parent / tuning.BEST] if result["best"] is not None and not report_only else []

    def said(width: int | None) -> str:
        table = text_table(tuning_rows(result), left=1, width=width)
        return "\n".join([table, *tuning_notes(result), *map(str, files)])

    show_or_write(said, result, json)


def read_choices(texts: list[str]) -> dict[str, list[str]]:
    """Read "optimizer.lr=1e-4,5e-4" -> key: values. Commas inside brackets do not part.

    Raises ConfigError for a key that comes twice.
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if key in choices:
            raise ConfigError(f"--try {key}: comes twice; give its values once, parted by commas")
        choices[key] = _parted(values)
    return choices


def _parted(text: str) -> list[str]:
    """Split at the commas that stand outside brackets; empty parts are left out."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
