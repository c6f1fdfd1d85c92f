"""The folder of a suite: images as GenEval lays them out, and what was said of each.

    OUT/setting.json                what was drawn, with what
    OUT/00000/metadata.jsonl        the first prompt's record
    OUT/00000/samples/0000.png      its first image
    OUT/scores.jsonl                a line per image: its file and what each reward gave
    OUT/summary.json                means with intervals

Whatever is there already is kept, so a suite that was stopped goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from flowrl.core.errors import DataError, RunError
from flowrl.core.files import parse_json, read_json, shaped, write_json, write_text
from flowrl.core.prompts import PromptSet
from flowrl.evaluation.image_files import find_images, read_image
from flowrl.evaluation.image_grids import save_png

SETTING, SUMMARY, SCORES = "setting.json", "summary.json", "scores.jsonl"
FREE = ("target", "batch", "best_of", "best_by")
"""Of a setting: what two folders that are compared need not share."""


class ScoreLine(BaseModel):
    """What a line of SCORES has at least."""

    model_config = ConfigDict(extra="allow")

    prompt: int
    image: int
    scores: dict[str, float | None]


def image_path(out: Path, prompt: int, image: int) -> Path:
    """Return where an image of a prompt lies."""
    return out / f"{prompt:05}" / "samples" / f"{image:04}.png"


def prepare(out: Path, setting: Mapping[str, Any], prompts: PromptSet) -> None:
    """Make the folder with its setting and records, or check that it is one of this setting.

    Raises RunError naming what differs.
    """
    file = out / SETTING
    if file.exists():
        known = read_setting(out)
        wrong = named_differences(known, setting, but=("batch",))
        if wrong:
            raise RunError(
                f"{out}: holds images of another setting: {'; '.join(wrong)}. Name another folder "
                "with --out, or delete this one"
            )
        return
    if out.exists() and any(out.iterdir()):
        raise RunError(
            f"{out}: expected a folder of a suite or none, got one with files and no {SETTING}"
        )
    for place, record in enumerate(prompts.records):
        write_text(out / f"{place:05}" / "metadata.jsonl", json.dumps(record) + "\n")
    # last: a folder with a setting has all its records
    write_json(file, dict(setting))


def read_setting(out: Path) -> dict[str, Any]:
    """Return the setting of a suite's folder. Raises RunError if there is none."""
    try:
        found = read_json(out / SETTING, constants=True)
    except (OSError, RunError) as error:
        raise RunError(
            f"{out}: expected a folder that `flowrl eval --suite` wrote, with {SETTING}: {error}"
        ) from error
    if not isinstance(found, dict):
        raise RunError(f"{out / SETTING}: expected an object, got {found!r:.100}")
    return found


def named_differences(
    one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str] = FREE
) -> list[str]:
    """Say in which keys two settings differ: "steps: 10 and 40"."""
    a, b = (json.loads(json.dumps(dict(setting))) for setting in (one, other))
    keys = [key for key in (a | b) if key not in but and a.get(key) != b.get(key)]
    return [f"{key}: {a.get(key)} and {b.get(key)}" for key in keys]


def unfinished(out: Path, prompts: int, images: int) -> list[int]:
    """Return the prompts that lack an image."""
    rows = []
    for prompt in range(prompts):
        there = [image_path(out, prompt, image).exists() for image in range(images)]
        if not all(there):
            rows.append(prompt)
    return rows


def save_images(out: Path, index: Sequence[int], images: Tensor, each: int) -> None:
    """Write images [n, 3, H, W], `each` of every prompt in `index` one after the other."""
    levels = (images.detach().float().cpu() * 255).round().to(torch.uint8)
    rows = levels.permute(0, 2, 3, 1).numpy()
    for place, (prompt, row) in enumerate(zip(index, rows, strict=True)):
        save_png(Image.fromarray(np.ascontiguousarray(row)), image_path(out, prompt, place % each))


def load_images(out: Path, prompt: int, images: int) -> Tensor:
    """Read the images of a prompt -> [images, 3, H, W] float32 in [0, 1].

    Raises DataError for one that is missing, broken or of another size than the first.
    """
    files = find_images([image_path(out, prompt, image) for image in range(images)])
    sizes = {file.size for file in files}
    if len(sizes) > 1:
        raise DataError(
            f"{files[0].path.parent}: expected images of one size, got "
            f"{' and '.join(f'{h} x {w}' for h, w in sorted(sizes))}"
        )
    return torch.stack([read_image(file)[0] for file in files]).float() / 255


def score_file(out: Path, rank: int) -> Path:
    """Return the file of lines of one process."""
    return out / (SCORES if rank == 0 else f"scores.{rank}.jsonl")


def read_lines(out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Return {(prompt, image): line} of all processes' files.

    A last line that was cut off is left out: that image is scored again. Raises DataError naming
    file and line for any other that cannot be read.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for file in sorted(out.glob("scores*.jsonl")):
        for line in _lines(file):
            found[line["prompt"], line["image"]] = line
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    rows = file.read_bytes().split(b"\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            where = f"{file}, line {number}"
            yield shaped(parse_json(row, where, constants=True), ScoreLine, where)
        except RunError as error:
            if number < len(rows):  # the last one has no line end: it was cut off
                raise DataError(
                    f"{where}: expected the scores of an image, got {row[:100]!r}: {error}"
                ) from error


def as_line(value: Mapping[str, Any]) -> str:
    """Return an object as one line of a JSONL file."""
    return json.dumps(dict(value)) + "\n"


def append_scores(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines to a file of scores."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write("".join(as_line(line) for line in lines))


def mend(file: Path) -> None:
    """Take a last line away that was cut off."""
    if not file.exists():
        return
    known = file.read_bytes()
    whole = known.rfind(b"\n") + 1
    if whole < len(known):
        file.write_bytes(known[:whole])
