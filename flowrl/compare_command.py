"""The command ``flowrl compare``: its arguments, and the report that it leaves behind. Imports torch only to run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, RunError

ABOUT = """Train configs x seeds until each run has used up a budget of network evaluations and one of seconds, judge
them on the same held-out prompts, and write a result file, tables and figures. The same command goes on after a stop;
with more configs or seeds it adds to what is there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="YAML files or names of shipped configs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of training (default: 0 1 2)")
    parser.add_argument(
        "--evaluations", type=float, default=60000, help="network evaluations of a run, per latent (default: 60000)"
    )
    parser.add_argument("--seconds", type=float, default=90, help="seconds of training of a run (default: 90)")
    parser.add_argument(
        "--clock",
        choices=["wall", "processor"],
        default="wall",
        help="processor: seconds that a processor worked for this run, over its threads, for a machine that others use",
    )
    parser.add_argument("--points", type=int, default=2, help="held-out evaluations of a run (default: 2)")
    parser.add_argument("--lr-search", type=float, nargs="+", metavar="FACTOR", help="first try train.lr times these")
    parser.add_argument("--search-seed", type=int, default=100, help="of the search, none of --seeds (default: 100)")
    parser.add_argument("--search-share", type=float, default=0.5, help="of --evaluations for a try (default: 0.5)")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="for all configs")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/compare/result.json"), help="the result file")
    parser.add_argument("--figures", type=Path, help="folder of the figures (default: beside the result file)")
    parser.add_argument("--report-only", action="store_true", help="train nothing; tables and figures from --out again")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    """Compare, or only report -> 0."""
    from flowrl.comparison import summarize
    from flowrl.comparison_file import read
    from flowrl.comparison_tables import terminal

    if args.report_only:
        if args.configs:
            raise ConfigError("--report-only reads --out alone: leave out the configs")
        result = summarize(read(args.out))
    else:
        result = _compare(args)
    print(terminal(result))
    for file in report(result, args.out, args.figures or args.out.parent, args.runs):
        print(file)
    return 0


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    from flowrl.compare import Comparison, Search, compare
    from flowrl.ledger import Budgets

    if not args.configs:
        raise ConfigError("compare: expected configs, or --report-only; `flowrl configs` lists the shipped ones")
    search = Search(tuple(args.lr_search), args.search_seed, args.search_share) if args.lr_search else None
    what = Comparison(
        configs=tuple(args.configs),
        seeds=tuple(args.seeds),
        budgets=Budgets(args.evaluations, args.seconds, args.points, args.clock),
        runs=args.runs,
        out=args.out,
        search=search,
        overrides=tuple(args.set),
        plugins=tuple(args.plugin),
    )
    return compare(what, quiet=args.quiet)


def report(result: dict[str, Any], out: Path, figures: Path, runs: Path) -> list[Path]:
    """Write tables and figures, and the sample grid where the runs are at hand -> the files. Raises RunError."""
    from flowrl.comparison_figures import accuracy_figure, gains_figure, training_figure
    from flowrl.comparison_tables import markdown
    from flowrl.figures import save_png
    from flowrl.loop import write_text

    drawn = {
        "gains": gains_figure(result),
        "evaluations": accuracy_figure(result, "evaluations"),
        "seconds": accuracy_figure(result, "seconds"),
        "training": training_figure(result),
    }
    files = []
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            files.append(figures / f"{out.stem}-{name}.png")
            figure.savefig(files[-1], dpi=130)
    except OSError as error:
        raise RunError(f"cannot write to {figures}: {error.strerror or error}") from error
    grid = sample_grid(result, runs)
    if grid is not None:
        files.append(figures / f"{out.stem}-samples.png")
        save_png(grid, files[-1])
    table = out.with_suffix(".md")
    write_text(table, markdown(result, [Path(os.path.relpath(file, out.parent)).as_posix() for file in files]))
    return [table, *files]


def sample_grid(result: dict[str, Any], runs: Path) -> Any:
    """Draw the base model's pictures and those of each config's first seed, from the same noise; None without runs."""
    from flowrl.budgeted import PROMPTS, STRIP
    from flowrl.comparison import labels
    from flowrl.figures import labelled_grid, load_strip
    from flowrl.ledger import RESULT

    base = runs / "base"
    if not (base / STRIP).exists():
        return None
    if json.loads((base / RESULT).read_text(encoding="utf-8"))["base"] != result["base"]:
        return None  # the folder is of another comparison
    prompts = json.loads((base / PROMPTS).read_text(encoding="utf-8"))
    columns = {"base model": load_strip(base / STRIP, len(prompts))}
    short = labels([config["name"] for config in result["configs"]])
    for config in result["configs"]:
        found = [runs / config["name"] / f"seed{run['seed']}" / STRIP for run in config["seeds"]]
        found = [file for file in found if file.exists()]
        if found:
            columns[short[config["name"]].replace("-", " ")] = load_strip(found[0], len(prompts))
    return labelled_grid(columns, prompts)
