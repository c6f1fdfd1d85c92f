"""Render true scenes of the shapes benchmark as reference images: a folder of PNGs, and a prompt
file naming them.

    python scripts/assets/make_shapes_references.py assets/shapes/train.jsonl \\
        assets/shapes/test.jsonl --out runs/references

writes runs/references/train/00000-0.png ... and runs/references/train.jsonl, whose records are
those of the prompt file with a column `references`: paths relative to the folder, so rewards need
`root: runs/references`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.suites.shapes.checker import check, validate
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import MAX_OBJECTS, render

TRIES = 20  # the checker passes over 98 of 100 true scenes


def true_scenes(records: Sequence[dict[str, Any]], rng: np.random.Generator) -> Tensor:
    """Render one scene true to each record that the checker also finds strictly right -> [N, 3, 64,
    64] in 8-bit steps.

    Raises DataError for a record that none of 20 scenes satisfies.
    """
    images = _rounded(records, rng)
    for _ in range(TRIES):
        wrong = (check(images, list(records)).strict == 0).nonzero().flatten().tolist()
        if not wrong:
            return images
        images[wrong] = _rounded([records[i] for i in wrong], rng)
    raise DataError(
        f"no scene in {TRIES} draws is true to {records[wrong[0]]['prompt']!r}; is it a prompt of "
        "the shapes benchmark?"
    )


def _rounded(records: Sequence[dict[str, Any]], rng: np.random.Generator) -> Tensor:
    return (render(scenes_for(records, rng)) * 255).round() / 255


def make_references(prompts: Path, out: Path, *, each: int, seed: int) -> Path:
    """Render `each` scenes per prompt of a file into `out` -> the new prompt file. Same arguments,
    same bytes."""
    # a scene has room for so many shapes
    known = load_prompts(prompts)
    for record, where in zip(known.records, known.places, strict=True):
        validate(record, where)
        if sum(entry["count"] for entry in record["include"]) > MAX_OBJECTS:
            raise DataError(
                f"{where}: a scene holds at most {MAX_OBJECTS} shapes, got {record['include']}"
            )
    folder = out / known.name
    folder.mkdir(parents=True, exist_ok=True)
    # each copy has a seed of its own, so more copies leave the first ones as they are
    names: list[list[str]] = [[] for _ in known.records]
    for copy in range(each):
        images = true_scenes(known.records, np.random.default_rng((seed, copy)))
        levels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
        for index, pixels in enumerate(levels):
            name = f"{known.name}/{index:05d}-{copy}.png"
            Image.fromarray(np.ascontiguousarray(pixels)).save(out / name)
            names[index].append(name)
    # the prompt file again, with the images of each prompt
    rows = [
        json.dumps({**record, "references": mine})
        for record, mine in zip(known.records, names, strict=True)
    ]
    file = out / f"{known.name}.jsonl"
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def main() -> None:
    """Draw the references and write the new prompt files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prompts", type=Path, nargs="+", help="prompt files in the benchmark's schema"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for images and new prompt files"
    )
    parser.add_argument("--each", type=int, default=4, help="images per prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # refuse before the first file is written
    if args.each < 1:
        parser.error(f"--each: expected at least 1, got {args.each}")
    if len({file.stem for file in args.prompts}) < len(args.prompts):
        parser.error(
            "expected prompt files of different names, since the images' folders are named after "
            "them"
        )
    for prompts in args.prompts:
        print(make_references(prompts, args.out, each=args.each, seed=args.seed))


if __name__ == "__main__":
    main()
