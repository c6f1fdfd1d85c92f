"""Look at the base model where the demonstration does not: harder prompts, prompts out of
distribution, and whether images are blank or flawed.

    python scripts/research/demonstration/base_checks.py

The lists are judged without guidance in 10 steps, with the guidance and steps that were best on
validation prompts, and by the best of eight images that the reward chooses. Blank images, and those
that are right but for a flaw, are counted on the training prompts, since the base model trains on
none of the lists. Writes assets/results/base-checks.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demonstration_measure import Bench, Setting, by_task, crossed_shares, images_of

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.statistics import wilson
from flowrl.evaluation.suites.shapes.checker import MAX_CLUTTER, judge_detections
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.runs.folder import read_object

BASE, SEED = "assets/shapes-sd3", 260_023
LOOKED_AT = "assets/shapes/train.jsonl"  # its images are looked at
LISTS = {"hard": "assets/shapes/hard-test.jsonl", "out of distribution": "assets/shapes/ood.jsonl"}
SETTINGS = {"base": (1.0, 10), "base_best_guidance": (5.0, 40)}
BEST_OF = 8


def main() -> None:
    """Measure, write, print."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--per-task", type=int, default=32, help="images, at least")
    made.add_argument("--images", type=int, default=2000, help="looked at for blanks, at least")
    made.add_argument("--work", type=Path, default=Path("runs/base-checks"))
    made.add_argument("--out", type=Path, default=Path("assets/results/base-checks.json"))
    args = made.parse_args()
    # one thread, so that sums come in the same order everywhere
    torch.set_num_threads(1)
    quiet_libraries()
    bench = Bench(args.work, "shapes/awm", [])
    result: dict[str, Any] = {
        "kind": "flowrl checks of the base model",
        "command": "python scripts/research/demonstration/base_checks.py",
        "looks": kept_looks(bench, BASE, args.images, "looks.json"),
        "lists": {},
        "environment": environment(),
    }
    # lists that the demonstration does not have, each at several settings
    for name, prompts in LISTS.items():
        asked = settings(BASE, prompts, args.per_task)
        asked[f"base_best_of_{BEST_OF}"] = asked["base"]._replace(best_of=BEST_OF)
        rows = {}
        for key, setting in asked.items():
            found = bench.measure(f"{name}-{key}".replace(" ", "-"), setting)
            rows[key] = row_of([found])
            print(f"{name}, {key}: {rows[key]['mean']:.3f}", flush=True)
        result["lists"][name] = rows
    write_json(args.out, result)


def settings(
    target: str, prompts: str, per_task: int, how: Mapping[str, tuple[float, int]] = SETTINGS
) -> dict[str, Setting]:
    """Return how a target is judged on a list, {name: setting}; all start from the same noise."""
    return {
        key: Setting(target, prompts, guidance, steps, per_task, SEED)
        for key, (guidance, steps) in how.items()
    }


def row_of(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put measurements of one setting, one per training seed, together: mean, interval, tasks, and
    what was measured."""
    setting = found[0]["setting"]
    about = {key: setting[key] for key in ("guidance", "steps", "best_of", "prompts")}
    images = sum(one["images"] for one in found)
    return {**crossed_shares(found), "images": images, **about}


def kept_looks(bench: Bench, target: str, least: int, name: str) -> dict[str, Any]:
    """Return what was counted before, or count it; the file is called `name`."""
    if not (bench.work / name).exists():
        bench.work.mkdir(parents=True, exist_ok=True)
        write_json(bench.work / name, looks(bench, target, least))
    return read_object(bench.work, name)


def looks(bench: Bench, target: str, least: int) -> dict[str, Any]:
    """Count blank images, right ones, and those that are right but for a flaw, of training prompts,
    without guidance."""
    # as many images of each prompt
    records = load_prompts(LOOKED_AT).records
    each = -(-least // len(records))
    setting = Setting(target, LOOKED_AT, 1.0, 10, each, SEED)
    model = bench.model(setting)
    images, blank, right, readable = 0, 0, 0, 0
    for number, rows in enumerate(by_task(records).values()):
        mine = [records[i] for i in rows]
        for some, pixels in images_of(model, mine, setting, each, number):
            found = detect(pixels, find_flaws=True)
            asked = [mine[i] for i in some]
            lenient = found._replace(flawed=np.zeros(len(some), bool), clutter=spared(found))
            images += len(some)
            blank += int(np.sum(found.number == 0))
            right += int(judge_detections(found, asked).strict.sum())
            readable += int(judge_detections(lenient, asked).strict.sum())
    return {
        "prompts": LOOKED_AT,
        "images": images,
        "blank": blank,
        "right": right,
        "right_but_for_flaws": readable - right,
        "flawless_of_readable": wilson(right, readable),
    }


def spared(found: Detections) -> np.ndarray:
    """Return the clutter [N] of images, 0 where there is as little as a readable image may have."""
    return np.where(found.clutter <= MAX_CLUTTER, 0.0, found.clutter)


if __name__ == "__main__":
    main()
