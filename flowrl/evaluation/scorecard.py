"""Show what rewards said of images: tables of scores and of held-out evaluations, CSV, JSON, and a
grid of the best and worst."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.files import write_text
from flowrl.core.tables import fixed_digits, interval_text, text_table
from flowrl.evaluation.image_grids import labelled_grid
from flowrl.evaluation.score_images import PromptedImage, RewardScores

MISSING = "not scored"
_TILE = 192  # pixels, of the longer side, where images have several sizes

_SHOWN = (
    *("guidance", "true_cfg_scale", "steps", "height", "width", "seed", "images", "tuned"),
    *("best_of", "best_by", "lora_scale", "prompts"),
)


def scorecard(
    images: Sequence[PromptedImage],
    scores: Mapping[str, RewardScores],
    has_prompts: bool,
    sort: str | None = None,
) -> dict[str, Any]:
    """Collect scores -> {"images": [{"file", "prompt", "scores"}], "summary": {reward: figures}},
    None = not scored.

    With `sort`, the name of a reward, the best come first and those without a score last. The std
    is that of a sample. Raises ConfigError for an unknown `sort`.
    """
    # the order of the images
    order = list(range(len(images)))
    if sort is not None:
        best_first = places_best_first(scores, sort)
        order = best_first + sorted(set(order) - set(best_first))
    # a row each
    rows = []
    for i in order:
        own = {name: _or_none(column.values[i].item()) for name, column in scores.items()}
        prompt = images[i].record["prompt"] if has_prompts else None
        rows.append({"file": images[i].name, "prompt": prompt, "scores": own})
    return {
        "images": rows,
        "summary": {name: score_summary(s.values) for name, s in scores.items()},
    }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def places_best_first(scores: Mapping[str, RewardScores], name: str) -> list[int]:
    """Return the places of the scored images, best first, equal ones in their order. Raises
    ConfigError."""
    if name not in scores:
        raise ConfigError(f"--sort: expected one of the rewards {', '.join(scores)}, got {name!r}")
    values = scores[name].values.tolist()
    known = [i for i, value in enumerate(values) if not math.isnan(value)]
    return sorted(known, key=values.__getitem__, reverse=True)


def score_summary(values: Tensor) -> dict[str, float | None]:
    """Return mean, std (of a sample), min and max of the scored ones, and how many are scored and
    not."""
    known = values[~values.isnan()].double()
    count: dict[str, float | None] = {"scored": len(known), "not_scored": len(values) - len(known)}
    if not len(known):
        return {"mean": None, "std": None, "min": None, "max": None, **count}
    std = known.std().item() if len(known) > 1 else None
    return {
        "mean": known.mean().item(),
        "std": std,
        "min": known.min().item(),
        "max": known.max().item(),
        **count,
    }


def scorecard_table(card: Mapping[str, Any], *, width: int | None = None) -> str:
    """Set a scorecard as a table of `width` columns: a line per image, then mean, std, min and
    max."""
    # a line per image
    figures = card["summary"]
    rows = [["file", *figures]]
    for image in card["images"]:
        rows.append([image["file"], *_cells(figures, image["scores"], MISSING)])
    # what they sum up to
    feet = []
    for key in ("mean", "std", "min", "max"):
        feet.append([key, *_cells(figures, {name: figures[name][key] for name in figures}, "-")])
    unscored = {name: figures[name]["not_scored"] for name in figures}
    if any(unscored.values()):
        feet.append([MISSING, *map(str, unscored.values())])
    return text_table([*rows, *feet], rules=(len(rows) - 1,), width=width)


def _cells(
    figures: Mapping[str, Any], values: Mapping[str, float | None], missing: str
) -> list[str]:
    """Return a value per reward, with the decimals that its range asks for."""
    out = []
    for name, value in values.items():
        cell = missing
        if value is not None:
            cell = f"{value:.{_digits(figures[name])}f}"
        out.append(cell)
    return out


def _digits(figures: Mapping[str, float | None]) -> int:
    """Return the decimals that leave about five digits: 4 up to 10, none from 100,000 on."""
    largest = max(abs(figures["min"] or 0.0), abs(figures["max"] or 0.0), 1.0)
    return max(0, 4 - int(math.log10(largest)))


def write_csv(path: Path, card: Mapping[str, Any]) -> None:
    """Write file, prompt and scores in full precision, all or nothing; a cell is empty where not
    scored.

    Raises RunError if it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "prompt", *card["summary"]])
    writer.writerows([p["file"], p["prompt"], *p["scores"].values()] for p in card["images"])
    write_text(path, text.getvalue())


def best_and_worst(
    images: Sequence[PromptedImage],
    scores: Mapping[str, RewardScores],
    names: Sequence[str],
    most: int = 8,
) -> Image.Image:
    """Draw for each of the rewards `names` the best images and, below, the worst, with rank,
    score and file.

    At most half of the scored images stand in a row. Raises DataError if a reward scored less
    than two.
    """
    # two rows for each reward
    rows = []
    for name in names:
        order = places_best_first(scores, name)
        count = min(most, len(order) // 2)
        if not count:
            raise DataError(
                f"--grid: expected at least 2 images scored by {name!r}, got {len(order)}"
            )
        best, worst = range(count), range(len(order) - count, len(order))
        title = f"of {len(order)}"
        rows.append(_row(images, scores[name], order, best, f"{name}: best {title}"))
        rows.append(_row(images, scores[name], order, worst, f"{name}: worst {title}"))
    # below each other
    width = max(row.width for row in rows)
    height = sum(row.height for row in rows)
    page = Image.new("RGB", (width, height), (255, 255, 255))
    top = 0
    for row in rows:
        page.paste(row, (0, top))
        top += row.height
    return page


def _row(
    images: Sequence[PromptedImage],
    scores: RewardScores,
    order: Sequence[int],
    places: Sequence[int],
    title: str,
) -> Image.Image:
    """Draw the images at some places of a ranking side by side."""
    mixed = len({image.size for image in images}) > 1
    columns = {}
    for place in places:
        image, value = images[order[place]], scores.values[order[place]]
        label = f"#{place + 1} {Path(image.name).name}: {value:.4g}"
        pixels = image.load()
        if mixed:
            pixels = _fitted(pixels)
        columns[label] = pixels[None]
    return labelled_grid(columns, [title])


def _fitted(image: Tensor) -> Tensor:
    """Fit an image [3, H, W] into a white square of `_TILE` pixels."""
    height, width = image.shape[1:]
    scale = _TILE / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    tile = torch.ones(3, _TILE, _TILE)
    top, left = (_TILE - size[0]) // 2, (_TILE - size[1]) // 2
    small = interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]
    tile[:, top : top + size[0], left : left + size[1]] = small.clamp(0, 1)
    return tile


def evaluation_table(result: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return an evaluation as a table of `width` columns: each task, the mean over tasks, seen and
    held-out prompts apart."""
    # label -> figures
    name = result["score"]
    rows = dict(result["tasks"])
    rows["mean over tasks"] = {**result, "mean": result[name]}
    rows |= {part: result[part] for part in ("seen", "held_out") if part in result}
    # a line each
    lines = [["", name, "95 % interval", "images"]]
    for label, row in rows.items():
        interval = interval_text(row["interval"])
        lines.append([label, fixed_digits(row["mean"]), interval, f"{row['images']}"])
    return text_table(lines, width=width)


def setting_line(setting: Mapping[str, Any]) -> str:
    """Say in a line what a score depends on; settings of earlier versions know no hash."""
    shown = ", ".join(f"{key} {setting[key]}" for key in _SHOWN if key in setting)
    if "prompts_hash" in setting:
        shown += f" ({setting.get('count')}, hash {setting['prompts_hash']})"
    return f"setting: {shown}"
