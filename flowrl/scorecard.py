"""Show what rewards said of pictures: a table, CSV, JSON, and a grid of the best and worst."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.errors import ConfigError, DataError, RunError
from flowrl.report import labelled_grid
from flowrl.scoring import Heard, Shot

MISSING = "not scored"
_TILE = 192  # pixels, of the longer side, where pictures have several sizes


def scorecard(shots: Sequence[Shot], heard: Mapping[str, Heard], told: bool, sort: str | None = None) -> dict[str, Any]:
    """Collect scores -> {"pictures": [{"file", "prompt", "scores"}], "summary": {reward: figures}}, None = not scored.

    With `sort`, the name of a reward, the best come first and those without a score last. The std is that of a sample.
    Raises ConfigError for an unknown `sort`.
    """
    columns = {name: [None if math.isnan(x) else x for x in h.values.tolist()] for name, h in heard.items()}
    order = list(range(len(shots)))
    if sort is not None:
        order = ranked(heard, sort)
        order += sorted(set(range(len(shots))) - set(order))
    pictures = [
        {
            "file": shots[i].name,
            "prompt": shots[i].record["prompt"] if told else None,
            "scores": {name: column[i] for name, column in columns.items()},
        }
        for i in order
    ]
    return {"pictures": pictures, "summary": {name: summary(h.values) for name, h in heard.items()}}


def ranked(heard: Mapping[str, Heard], name: str) -> list[int]:
    """Return the places of the scored pictures, best first, equal ones in their order. Raises ConfigError."""
    if name not in heard:
        raise ConfigError(f"--sort: expected one of the rewards {', '.join(heard)}, got {name!r}")
    values = heard[name].values.tolist()
    return sorted((i for i, x in enumerate(values) if not math.isnan(x)), key=lambda i: -values[i])


def summary(values: Tensor) -> dict[str, float | None]:
    """Return mean, std (of a sample), min and max of the scored ones, and how many are scored and not."""
    known = values[~values.isnan()].double()
    count: dict[str, float | None] = {"scored": len(known), "not_scored": len(values) - len(known)}
    if not len(known):
        return {"mean": None, "std": None, "min": None, "max": None, **count}
    std = known.std().item() if len(known) > 1 else None
    return {"mean": known.mean().item(), "std": std, "min": known.min().item(), "max": known.max().item(), **count}


def table(card: Mapping[str, Any]) -> str:
    """Set a scorecard as aligned text: a line per picture, then mean, std, min and max."""
    names = list(card["summary"])
    digits = {name: _digits(card["summary"][name]) for name in names}

    def cells(scores: Mapping[str, float | None], missing: str) -> list[str]:
        return [missing if scores[name] is None else f"{scores[name]:.{digits[name]}f}" for name in names]

    rows = [["file", *names]] + [[p["file"], *cells(p["scores"], MISSING)] for p in card["pictures"]]
    feet = [[k, *cells({n: card["summary"][n][k] for n in names}, "-")] for k in ("mean", "std", "min", "max")]
    if any(card["summary"][name]["not_scored"] for name in names):
        feet.append([MISSING, *(f"{card['summary'][name]['not_scored']}" for name in names)])
    widths = [max(len(row[i]) for row in rows + feet) for i in range(len(names) + 1)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows + feet
    ]
    rule = "-" * len(lines[0])
    return "\n".join([lines[0], rule, *lines[1 : len(rows)], rule, *lines[len(rows) :]])


def _digits(figures: Mapping[str, float | None]) -> int:
    """Return the decimals that leave about five digits: 4 up to 10, none from 100,000 on."""
    largest = max(abs(figures["min"] or 0.0), abs(figures["max"] or 0.0), 1.0)
    return max(0, 4 - int(math.log10(largest)))


def write_csv(path: Path, card: Mapping[str, Any]) -> None:
    """Write file, prompt and scores in full precision, all or nothing; a cell is empty where not scored.

    Raises RunError if it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "prompt", *card["summary"]])
    writer.writerows([p["file"], p["prompt"], *p["scores"].values()] for p in card["pictures"])
    partial = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        try:
            partial.write_text(text.getvalue(), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def best_and_worst(
    shots: Sequence[Shot], heard: Mapping[str, Heard], names: Sequence[str], most: int = 8
) -> Image.Image:
    """Draw for each of the rewards `names` the best pictures and, below, the worst, with rank, score and file.

    At most half of the scored pictures stand in a row. Raises DataError if a reward scored less than two.
    """
    rows, mixed = [], len({shot.size for shot in shots}) > 1
    for name in names:
        order = ranked(heard, name)
        count = min(most, len(order) // 2)
        if not count:
            raise DataError(f"--grid: expected at least 2 pictures scored by {name!r}, got {len(order)}")
        for which, places in (("best", range(count)), ("worst", range(len(order) - count, len(order)))):
            images = [shots[order[place]].load() for place in places]
            images = [_fitted(image) for image in images] if mixed else images
            labels = [
                f"#{place + 1} {Path(shots[order[place]].name).name}: {heard[name].values[order[place]]:.4g}"
                for place in places
            ]
            columns = {label: image[None] for label, image in zip(labels, images, strict=True)}
            rows.append(labelled_grid(columns, [f"{name}: {which} of {len(order)}"]))
    page = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), (255, 255, 255))
    for row, top in zip(rows, accumulate((row.height for row in rows), initial=0), strict=False):
        page.paste(row, (0, top))
    return page


def _fitted(image: Tensor) -> Tensor:
    """Fit a picture [3, H, W] into a white square of `_TILE` pixels."""
    height, width = image.shape[1:]
    scale = _TILE / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    tile = torch.ones(3, _TILE, _TILE)
    top, left = (_TILE - size[0]) // 2, (_TILE - size[1]) // 2
    small = interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
    tile[:, top : top + size[0], left : left + size[1]] = small.clamp(0, 1)
    return tile
