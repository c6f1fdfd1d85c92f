"""Make images of the training prompts for shapes/ddrl, rendered and not sampled.

    python scripts/assets/shapes_images.py --out data/shapes_images

Each prompt of `assets/shapes/train.jsonl` has `--images` of them: what it asks for is there, and
what it leaves open, such as places, sizes and colours, is drawn anew for each. The list that is
written names them as `image`, beside all that the prompt's own record says.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl.core.files import write_text
from flowrl.core.pixels import to_bytes
from flowrl.core.prompts import PromptSet, Record, load_prompts
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render

LIST = "train.jsonl"


def main() -> None:
    """Write train.jsonl, and the images beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/shapes_images"))
    parser.add_argument("--prompts", default="assets/shapes/train.jsonl")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.images < 1:
        parser.error(f"--images: expected at least 1 image of each prompt, got {given.images}")
    records = draw(load_prompts(given.prompts), given.out, given.images, given.seed)
    lines = [json.dumps(record) + "\n" for record in records]
    write_text(given.out / LIST, "".join(lines))
    print(f"{len(records)} prompts with {given.images} images each in {given.out / LIST}")


def draw(prompts: PromptSet, out: Path, images: int, seed: int) -> list[Record]:
    """Render `images` of each prompt into files below `out` -> records that name them."""
    (out / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    names: list[list[str]] = [[] for _ in prompts.records]
    for number in range(images):
        levels = to_bytes(render(scenes_for(prompts.records, rng)))
        for row, image in enumerate(levels):
            name = f"images/{row}-{number}.png"
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(out / name)
            names[row].append(name)
    found = zip(prompts.records, names, strict=True)
    return [{**record, "image": mine} for record, mine in found]


if __name__ == "__main__":
    main()
