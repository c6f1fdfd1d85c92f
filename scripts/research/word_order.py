"""Count how often a model reads the order of words: asked against opposite, asked against swapped.

    python scripts/research/word_order.py assets/shapes-sd3 --guidance 1 2.5

TARGET is a model folder, a run, or a config. Prompts are those of `position` and `color_attr` in
the validation list. Counted are images with exactly the two right shapes, and of these the objects
that stand as asked, the opposite way, and neither; colours as asked, swapped, and neither. A model
that does not read the order has asked : opposite near 1 : 1.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts
from flowrl.core.tables import text_table
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import sampled_images
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.evaluation.suites.shapes.word_order import ORDER_TASKS, Order, word_order
from flowrl.runs.open_run import open_target


def main() -> None:
    """Print one row per guidance value and task, and write them where `--json` says."""
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    quiet_libraries()
    # prompts in which order means something
    records = [r for r in load_prompts(args.prompts).records if r["tag"] in ORDER_TASKS]
    found_all: list[dict[str, Any]] = []
    rows = [["guidance", "task", "asked : other : neither", "asked : other", "right", "images"]]
    for guidance in args.guidance:
        overrides = [f"model.guidance={guidance:g}", *args.set]
        target = open_target(args.target, settings=args.config, overrides=overrides)
        counted = orders(target.model, records, args.images, args.steps, args.seed)
        for task, found in counted.items():
            rows.append([f"{guidance:g}", task, *texts(*found)])
            order, right, images = found
            counts = {"images": images, "right": right, **order._asdict()}
            found_all.append({"guidance": guidance, "task": task, **counts})
    print(text_table(rows, left=2))
    if args.json:
        setting = {key: getattr(args, key) for key in ("target", "prompts", "steps", "seed")}
        command = shlex.join(["python", *sys.argv])
        write_json(args.json, {"command": command, **setting, "counted": found_all})


def parser() -> argparse.ArgumentParser:
    """Describe the command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("target", help="model folder, run or config")
    made.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.5])
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--images", type=int, default=8, help="per prompt")
    made.add_argument("--seed", type=int, default=4321)
    made.add_argument("--prompts", default="assets/shapes/validation.jsonl")
    made.add_argument("--config", default="shapes/awm", help="settings of a model folder")
    made.add_argument("--set", nargs="*", default=[], help="overrides of the config")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--json", type=Path, help="write the counts here, too")
    return made


def orders(
    model: FlowModel, records: list[Record], images: int, steps: int, seed: int
) -> dict[str, tuple[Order, float, int]]:
    """Sample and count -> per task the counts, the share of strictly right images, the images."""
    # images of all prompts
    options: dict[str, Any] = {"height": 64, "width": 64, "steps": steps, "seed": seed}
    texts = [record["prompt"] for record in records]
    index, parts = list[int](), []
    for rows, pixels in sampled_images(model, texts, images=images, batch=128, **options):
        index += rows
        parts.append(pixels.cpu())
    # what is on them
    drawn, asked = torch.cat(parts), [records[i] for i in index]
    strict = check(drawn, asked).strict
    out = {}
    for task in ORDER_TASKS:
        mine = torch.tensor([record["tag"] == task for record in asked])
        right = float(strict[mine].float().mean())
        out[task] = (word_order(drawn, asked, task), right, int(mine.sum()))
    return out


def texts(order: Order, right: float, images: int) -> list[str]:
    """Write the counts, their ratio, and the share of right images."""
    counts = " : ".join(map(str, order))
    ratio = f"{order.asked / order.opposite:.2f}" if order.opposite else "-"
    return [counts, ratio, f"{right:.1%}", str(images)]


if __name__ == "__main__":
    main()
