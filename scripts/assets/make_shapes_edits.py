"""Write the prompt lists of the editing task, and the images that they start from.

Each scene is drawn for one kind of edit, from a seed of its own list, so no scene is in two lists.
Scenes that the checker misreads are left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.edits import KINDS, Edits, check_edits, draw_edits
from flowrl.evaluation.suites.shapes.scene import Scenes, render

COUNTS = {"train": 384, "validation": 32, "test": 64}


def main() -> None:
    """Write all lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("assets/shapes-edits"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for place, (name, count) in enumerate(COUNTS.items()):
        write(args.out, name, count, args.seed * 1000 + place)


def write(out: Path, name: str, count: int, seed: int) -> None:
    """Write a list of `count` edits, every kind as often, and their sources."""
    kinds = np.arange(count) % len(KINDS)
    edits = readable(np.random.default_rng(seed), kinds)
    images = (render(edits.before) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for row, (image, record) in enumerate(zip(images, edits.records, strict=True)):
        file = folder / f"{row:03}.png"
        Image.fromarray(image).save(file, optimize=True)
        lines.append(json.dumps({**record, "source": file.relative_to(out).as_posix()}) + "\n")
    (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{out / name}.jsonl: {count} edits")


def readable(rng: np.random.Generator, kinds: np.ndarray) -> Edits:
    """Draw edits that the checker finds right as they are rendered; others are drawn again."""
    edits = draw_edits(rng, kinds)
    while wrong := [row for row in range(len(kinds)) if not _right(edits, row)]:
        fresh = draw_edits(rng, kinds[wrong])
        for scenes, other in ((edits.before, fresh.before), (edits.after, fresh.after)):
            for field, new in zip(scenes, other, strict=True):
                field[wrong] = new
        for row, record in zip(wrong, fresh.records, strict=True):
            edits.records[row] = record
    return edits


def _right(edits: Edits, row: int) -> bool:
    images = [
        render(Scenes(*(field[row : row + 1] for field in scenes)))
        for scenes in (edits.before, edits.after)
    ]
    try:
        return bool(check_edits(images[1], images[0], edits.records[row : row + 1]).strict)
    except DataError:  # its object is not read in the source
        return False


if __name__ == "__main__":
    main()
