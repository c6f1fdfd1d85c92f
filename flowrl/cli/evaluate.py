"""``flowrl eval``, ``flowrl measure`` and ``flowrl sweep``."""

from __future__ import annotations

import math
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
Images = Annotated[int | None, typer.Option(help="images per prompt")]
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
    images: Images = None,
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


Names = Annotated[
    list[str],
    typer.Option(
        "--measure",
        default_factory=list,
        show_default=False,
        metavar="NAME",
        help="fid, kid, inception_score, lpips, vendi, distance; repeatable",
    ),
]
Reference = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="of images, for fid and kid")
]
Inception = Annotated[
    str | None, typer.Option(metavar="FILE", help="FID's Inception: fid, kid, inception_score")
]
Alexnet = Annotated[str | None, typer.Option(metavar="FILE", help="torchvision's AlexNet: lpips")]
Encoder = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="image encoder of transformers: vendi, distance"),
]


def measure(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="of a suite, or of images")],
    *,
    measures: Names,
    reference: Reference = None,
    inception: Inception = None,
    alexnet: Alexnet = None,
    encoder: Encoder = None,
    batch: Annotated[int, typer.Option(help="images at once")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    json: options.Json = None,
) -> None:
    """Measure a folder of images: distance to others, clarity, diversity."""
    from flowrl.core.errors import ConfigError
    from flowrl.evaluation.measures.of_images import MEASURES, Tools
    from flowrl.evaluation.measures.of_images import measure_images as measured
    from flowrl.evaluation.suites.image_folder import SETTING, read_setting

    if not measures:
        raise ConfigError(f"name what to measure: --measure {' | '.join(MEASURES)}")
    options.quiet_libraries()
    tools = Tools(reference, inception, alexnet, encoder, batch, device)
    found = measured(folder, measures, tools)
    if (folder / SETTING).exists():  # of a suite: what the images were made with
        found["setting"] = read_setting(folder)
    show_or_write(_measured_text(folder, found), {"folder": str(folder), **found}, json)


def _measured_text(folder: Path, found: Mapping[str, Any]) -> str:
    from flowrl.core.files import without
    from flowrl.evaluation.scorecard import setting_line

    lines = [f"{folder}: {found['images']} images, {found['prompts']} prompts"]
    for name, parts in found.items():
        if isinstance(parts, dict) and name != "setting":
            rest = without(parts, "value")
            more = ", ".join(f"{key} {_short(value)}" for key, value in rest.items())
            lines.append(f"{name}: {parts['value']:.4f} ({more})")
    if "setting" in found:
        lines.append(setting_line(found["setting"]))
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(_short(each) for each in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


Numbers = Annotated[
    str | None,
    typer.Option(metavar="N,N...", help="default: as the target has it"),
]


SweptSuite = Annotated[str, typer.Option(help="shapes, geneval, ocr ..., as of flowrl eval")]
SweptPrompts = Annotated[
    str | None,
    typer.Option(help="prompt file or list; default: the suite's validation prompts"),
]
Count = Annotated[int, typer.Option(help="how many of them, evenly by task; 0: all")]
SweepOut = Annotated[Path | None, typer.Option(metavar="FOLDER", callback=options.check_folder)]
By = Annotated[
    str, typer.Option(metavar="NAME", help="headline (default), mmhm, a reward or a measure")
]


def sweep(
    name: options.Name,
    *,
    suite: SweptSuite,
    guidance: Numbers = None,
    steps: Numbers = None,
    lora_scale: Numbers = None,
    prompts: SweptPrompts = None,
    count: Count = 0,
    by: By = "",
    measures: Names,
    reference: Reference = None,
    inception: Inception = None,
    alexnet: Alexnet = None,
    encoder: Encoder = None,
    images: Images = None,
    out: SweepOut = None,
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
    from flowrl.evaluation.measures.of_images import Tools
    from flowrl.evaluation.suites.catalogue import overrides_of
    from flowrl.runs.sweep import SweepRequest, choose_prompts, sweep_table
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

    result = swept(open_target, asked, where, progress=count_up)
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
