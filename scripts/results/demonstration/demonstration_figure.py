"""The figure: base, base with guidance, and after training, from the same noise, judged."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from demonstration_measure import Bench, Setting, by_task, images_of
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.files import replacing
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.image_grids import RIGHT, WRONG
from flowrl.evaluation.suites.shapes.checker import check

EACH = 4
INK, QUIET, PAPER = (34, 34, 34), (110, 110, 110), (255, 255, 255)
TILE, FRAME, GAP, BLOCK, LABEL, HEAD, FOOT = 96, 4, 6, 30, 230, 44, 26
"""Pixels: an image, its frame, between images, between blocks, for the prompt, the head, a rate."""


class Block(NamedTuple):
    """Four images of one prompt under one setting."""

    images: Tensor  # [4, 3, 64, 64]
    right: list[bool]
    rate: float  # of the task, over all of its images


def draw_figure(bench: Bench, result: dict[str, Any], args: argparse.Namespace, file: Path) -> None:
    """Draw one prompt of each task, drawn by lot, and write the PNG."""
    records = load_prompts(args.test).records
    lot = random.Random(args.seed)
    chosen = {task: lot.choice(rows) for task, rows in by_task(records).items()}
    columns = {
        "base": ("base", args.base),
        "base + guidance": ("base_best_guidance", args.base),
        "after RL": ("rl", args.runs[0]),
    }
    # images of all prompts under each setting, from one noise
    blocks: dict[str, list[Block]] = {}
    asked = [records[i] for i in chosen.values()]
    for head, (name, target) in columns.items():
        found = result[name]
        options = {"guidance": found["guidance"], "steps": found["steps"]}
        setting = Setting(str(target), args.test, per_task=EACH, seed=args.seed, **options)
        parts = [some for _, some in images_of(bench.model(setting), asked, setting, EACH, 99)]
        images = torch.cat(parts).unflatten(0, (len(asked), EACH))
        blocks[head] = []
        for task, record, some in zip(chosen, asked, images, strict=True):
            right = check(some, [record] * EACH).strict.tolist()
            blocks[head].append(Block(some, right, found["tasks"][task]["mean"]))
    page = compose([record["prompt"] for record in asked], list(chosen), blocks)
    with replacing(file) as draft:
        page.save(draft, format="PNG", optimize=True)


def compose(prompts: list[str], tasks: list[str], blocks: dict[str, list[Block]]) -> Image.Image:
    """Set blocks in rows of prompts and columns of settings."""
    wide = EACH * (TILE + GAP) - GAP
    tall = TILE + FOOT + GAP
    size = LABEL + len(blocks) * (wide + BLOCK), HEAD + len(prompts) * tall + GAP
    page = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(page)
    big, small = (ImageFont.load_default(points) for points in (17, 14))
    # prompts at the left
    for row, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
        y = HEAD + row * tall + 18
        for line in _lines(prompt, 24):
            draw.text((14, y), line, INK, font=big)
            y += 21
        draw.text((14, y + 2), task.replace("_", " "), QUIET, font=small)
    # a column of blocks for each setting
    for column, (head, some) in enumerate(blocks.items()):
        x = LABEL + column * (wide + BLOCK)
        draw.text((x, 14), head, INK, font=big)
        for row, block in enumerate(some):
            y = HEAD + row * tall
            for i, (image, right) in enumerate(zip(block.images, block.right, strict=True)):
                _tile(page, draw, image, (x + i * (TILE + GAP), y), right)
            text = f"{100 * block.rate:.0f} % of this task's images are right"
            draw.text((x, y + TILE + 4), text, QUIET, font=small)
    return page


def _tile(
    page: Image.Image, draw: ImageDraw.ImageDraw, image: Tensor, at: tuple[int, int], right: bool
) -> None:
    """Paste an image [3, 64, 64] in a frame, green where the checker accepts it."""
    x, y = at
    draw.rectangle((x, y, x + TILE - 1, y + TILE - 1), fill=RIGHT if right else WRONG)
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    inner = Image.fromarray(np.ascontiguousarray(pixels))
    inner = inner.resize((TILE - 2 * FRAME, TILE - 2 * FRAME), Image.Resampling.LANCZOS)
    page.paste(inner, (x + FRAME, y + FRAME))


def _lines(text: str, most: int) -> list[str]:
    """Break a text into lines of at most so many letters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
