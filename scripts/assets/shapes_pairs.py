"""Make preference pairs of shapes for shapes/diffusion_dpo_offline.

    python scripts/assets/shapes_pairs.py --out data/shapes_pairs

The embedded base model draws `--images` images of each training prompt, `--rounds` times; of a
prompt the best and the worst by the reward `shapes` become a pair. A prompt whose images are all
equally good has none.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image

from flowrl.config.load import load_config
from flowrl.core.prompts import Record
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

PART = 32  # prompts that are drawn at a time


def main() -> None:
    """Write pairs.jsonl, and the images beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/shapes_pairs"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--images", type=int, default=8)
    given = parser.parse_args()
    # the base model, its prompts and its checker
    options = [f"train.group={given.images}", f"train.prompts={PART}"]
    trainer = Trainer(load_config("shapes/diffusion_dpo", options))
    (given.out / "images").mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    rows = list(range(len(trainer.train_set)))
    for part in range(given.rounds):
        for first in range(0, len(rows), PART):
            records += draw(trainer, rows[first : first + PART], given.out, part)
            trainer.state.iteration += 1  # another noise
    lines = [json.dumps(record) + "\n" for record in records]
    (given.out / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(records)} pairs in {given.out / 'pairs.jsonl'}")


def draw(trainer: Trainer, rows: list[int], out: Path, part: int) -> list[Record]:
    """Draw images of training prompts, keep the best and the worst of each -> records."""
    found = collect(trainer, rows)
    scores, group = found.values["shapes"], found.batch.group
    records = []
    for place, row in enumerate(rows):
        mine = (group == place).nonzero().flatten()
        best, worst = mine[scores[mine].argmax()], mine[scores[mine].argmin()]
        if scores[best] == scores[worst]:
            continue
        # which of the two comes first is left to chance
        first = random.Random(f"{part} {row}").random() < 0.5
        pair = (best, worst) if first else (worst, best)
        names = [f"images/{part}-{row}-{side}.png" for side in (0, 1)]
        for name, image in zip(names, pair, strict=True):
            levels = found.batch.images[image].permute(1, 2, 0)
            Image.fromarray(levels.numpy()).save(out / name)
        labels = {"image_0": names[0], "image_1": names[1], "label_0": int(first)}
        records.append({**trainer.train_set.records[row], **labels})
    return records


if __name__ == "__main__":
    main()
