"""``flowrl sweep``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import measure, options
from flowrl.cli.output import count_up, show_or_write
from flowrl.core.errors import ConfigError

Numbers = Annotated[
    str | None,
    typer.Option(metavar="N,N...", help="default: as the target has it"),
]


Suite = Annotated[str, typer.Option(help="shapes, geneval, ocr ..., as of flowrl eval")]
Prompts = Annotated[
    str | None,
    typer.Option(help="prompt file or list; default: the suite's validation prompts"),
]
Count = Annotated[int, typer.Option(help="how many of them, evenly by task; 0: all")]
By = Annotated[
    str, typer.Option(metavar="NAME", help="headline (default), mmhm, a reward or a measure")
]
Images = Annotated[int | None, typer.Option(help="images per prompt")]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", callback=options.check_folder)]


def sweep(
    name: options.Name,
    *,
    suite: Suite,
    guidance: Numbers = None,
    steps: Numbers = None,
    lora_scale: Numbers = None,
    prompts: Prompts = None,
    count: Count = 0,
    by: By = "",
    measures: measure.Names,
    reference: measure.Reference = None,
    inception: measure.Inception = None,
    alexnet: measure.Alexnet = None,
    encoder: measure.Encoder = None,
    images: Images = None,
    out: Out = None,
    config: options.Settings = options.DEFAULT,
    weights: options.Weights = None,
    iteration: options.Iteration = None,
    seed: options.Seed = None,
    changes: options.Set,
    profile: options.Profile = None,
    json: options.Json = None,
    plugin: options.Plugins,
) -> None:
    """Find the guidance, steps and LoRA scale that serve a model best, on validation prompts."""
    from flowrl.cli.evaluate import suite_folder
    from flowrl.evaluation.measures.of_images import Tools
    from flowrl.evaluation.suites.catalogue import overrides_of
    from flowrl.runs.open_run import Target
    from flowrl.runs.sweep import SweepRequest, choose_prompts
    from flowrl.runs.sweep import sweep as swept

    # what was left out is not swept: it stays as the config has it
    asked = SweepRequest(
        suite,
        [*_read_numbers(guidance, "--guidance")] or [None],
        [*_read_steps(steps)] or [None],
        _read_numbers(lora_scale, "--lora-scale") or [1.0],
        prompts or "",
        count,
        by,
        measures,
        Tools(reference, inception, alexnet, encoder),
    )
    # the suite's settings first, so that --set can change them
    folder = suite_folder(suite, name, weights, iteration).relative_to("suites")
    where = out or Path("sweeps") / folder
    own: dict[str, int | str | None] = {"eval.seed": seed, "eval.images": images}
    given = [*overrides_of(suite, choose_prompts(asked, where)), *changes]

    # the sweep loads the model anew for each guidance
    def open_target(more: list[str]) -> Target:
        about = (name, config, weights, iteration, own, [*given, *more], plugin, profile)
        return options.opened(*about, to_judge=True)

    _show_result(swept(open_target, asked, where, progress=count_up), where, json)


def _show_result(result: dict[str, Any], where: Path, json: Path | None) -> None:
    """Print the table, or write JSON."""
    from flowrl.runs.sweep import sweep_table

    show_or_write(
        lambda width: f"{sweep_table(result, width=width)}\nsettings: {where}", result, json
    )


def _read_numbers(text: str | None, option: str) -> list[float]:
    """Read "1,2.5,4". Raises ConfigError."""
    if text is None:
        return []
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{option}: expected numbers like 1,2.5,4, got {text!r}")
    return numbers


def _read_steps(text: str | None) -> list[int]:
    """Read "10,20". Raises ConfigError."""
    numbers = _read_numbers(text, "--steps")
    if not all(number >= 1 and number.is_integer() for number in numbers):
        raise ConfigError(f"--steps: expected whole numbers >= 1 like 10,20, got {text!r}")
    return [int(number) for number in numbers]
