"""``flowrl eval``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowrl.cli import options
from flowrl.cli.output import count_up, show_or_write
from flowrl.core.errors import ConfigError

if TYPE_CHECKING:
    from flowrl.runs.open_run import Target

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="of a suite; default: suites/SUITE/TARGET",
        callback=options.check_folder,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="of a suite: compare with this one, image by image"),
]


def evaluate(
    name: options.Name,
    *,
    suite: Annotated[
        str | None,
        typer.Option(help="a benchmark: shapes, geneval, ocr ...; its images are kept in --out"),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="prompt file or list; default: the suite's, or the config's held-out one"
        ),
    ] = None,
    images: Annotated[int | None, typer.Option(help="images per prompt")] = None,
    out: Out = None,
    against: Against = None,
    config: options.Settings = options.DEFAULT,
    weights: options.Weights = None,
    iteration: options.Iteration = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    changes: options.Set,
    profile: options.Profile = None,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Score a model, a run or a checkpoint on held-out prompts or a suite, with intervals."""
    from flowrl.cost.out_of_memory import explained
    from flowrl.evaluation.scorecard import evaluation_table, setting_line
    from flowrl.evaluation.suites.catalogue import overrides_of
    from flowrl.runs.evaluate import evaluate as evaluated

    # options that are short for --set
    own: dict[str, int | str | None] = {
        "eval.steps": steps,
        "eval.seed": seed,
        "eval.images": images,
    }
    # a suite keeps its images in a folder, an evaluation keeps none
    if suite is not None:
        where = out or suite_folder(suite, name, weights, iteration)
        # the suite's settings first, so that --set can change them
        given = [*overrides_of(suite, prompts), *changes]
        about = (name, config, weights, iteration, own, given, plugin, profile)
        _suite(options.opened(*about, to_judge=True), suite, where, against, json)
        return
    if out is not None or against is not None:
        raise ConfigError("--out and --against belong to --suite NAME")
    own["prompts.test"] = prompts or None
    found = options.opened(name, config, weights, iteration, own, changes, plugin, profile)
    with explained(found.config, "eval"):
        result = evaluated(found.model, found.config, base=found.base, progress=count_up)

    def text(width: int | None) -> str:
        table = evaluation_table(result, width=width)
        return f"{found.what}\n{table}\n{setting_line(result['setting'])}"

    show_or_write(text, {"target": name, **result}, json)


def suite_folder(suite: str, name: str, weights: str | None, iteration: str | None) -> Path:
    """Return the folder of a suite's images for a target."""
    parts = [name.strip("/"), weights or "", iteration or ""]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(part for part in parts if part)).strip("-.")
    return Path("suites") / suite / (slug or "model")


def _suite(found: Target, suite: str, out: Path, against: Path | None, json: Path | None) -> None:
    """Run a suite and print its table, the difference, and the setting."""
    from flowrl.core.processes import world
    from flowrl.cost.out_of_memory import explained
    from flowrl.runs.suite import run_suite

    here = world()
    with explained(found.config, "eval"):
        result = run_suite(
            found.model,
            found.config,
            suite,
            out,
            target=found.what,
            base=found.base,
            against=against,
            progress=count_up,
            world=here,
            content=found.content,
        )
    if here.main:
        show_or_write(lambda width: _text(found.what, out, result, width), result, json)


def _text(what: str, out: Path, result: Mapping[str, Any], width: int | None) -> str:
    """Put a suite's report into words: table, difference, leaks, setting."""
    from flowrl.core.tables import interval_text
    from flowrl.evaluation.scorecard import evaluation_table, setting_line

    # the headline has the table; the other rewards a line each
    lines = [what, evaluation_table(result, width=width)]
    for name, value in result["rewards"].items():
        if name != result["score"]:
            span = interval_text(result["intervals"][name], 4)
            lines.append(f"{name}: mean {value:.4f}, 95 % interval {span}")
    # a benchmark's own numbers, with intervals over prompts
    for name, values in result.get("tables", {}).items():
        for what, value in values.items():
            ends = result["table_intervals"][name][what]
            of = f"95 % interval {ends[0]:.4f} to {ends[1]:.4f}" if ends else "of one prompt"
            lines.append(f"{name}, {what}: {value:.4f}, {of}")
    # the paired difference to another folder, and what makes the numbers doubtful
    if "against" in result:
        found = result["against"]
        span = interval_text(found["interval"], sign=True)
        lines.append(
            f"against {found['folder']}: {found['difference']:+.3f}, 95 % interval {span} (paired, "
            "over prompts)"
        )
    lines += [f"leak: {line}" for line in result.get("leaks", [])]
    lines.append(setting_line(result["setting"]))
    lines.append(f"images, scores and summary: {out}")
    return "\n".join(lines)
