"""``flowrl measure``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write

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
    show_or_write(_text(folder, found), {"folder": str(folder), **found}, json)


def _text(folder: Path, found: Mapping[str, Any]) -> str:
    from flowrl.evaluation.scorecard import setting_line

    lines = [f"{folder}: {found['images']} images, {found['prompts']} prompts"]
    for name, parts in found.items():
        if isinstance(parts, dict) and name != "setting":
            rest = {key: value for key, value in parts.items() if key != "value"}
            more = ", ".join(f"{key} {_short(value)}" for key, value in rest.items())
            lines.append(f"{name}: {parts['value']:.4f} ({more})")
    if "setting" in found:
        lines.append(setting_line(found["setting"]))
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(_short(each) for each in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)
