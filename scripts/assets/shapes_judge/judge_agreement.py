"""How often the judge and the checker agree about a model's images.

    python scripts/assets/shapes_judge/judge_agreement.py assets/shapes-sd3 runs/a \\
        --out assets/results/judge.json

A target is a model folder, a run or a config. If training had taught a model to please the checker
and nobody else, the two would agree less often about its images than about the base model's. The
result file has, for each target: images, the share on which both agree with its 95 % interval
(Wilson's), the four counts, and both shares of right images, overall and per task.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from judge_network import Judge, is_right, load_judge, things_on

from flowrl.cli.options import quiet_libraries
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.prompts import load_prompts
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import sampled_images
from flowrl.evaluation.statistics import wilson
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import Record
from flowrl.runs.open_run import open_target


def main() -> None:
    """Judge every target's images and write the result file."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("targets", nargs="+")
    made.add_argument("--prompts", default="assets/shapes/test.jsonl")
    made.add_argument("--images", type=int, default=8, help="per prompt")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--guidance", type=float, default=1.0)
    made.add_argument("--seed", type=int, default=260_024)
    made.add_argument("--out", type=Path, default=Path("assets/results/judge.json"))
    args = made.parse_args()
    torch.set_num_threads(1)
    quiet_libraries()
    judge, records = load_judge(), load_prompts(args.prompts).records
    overrides = [f"model.guidance={args.guidance:g}"]
    # each target on the same prompts from the same noise
    found = {}
    for name in args.targets:
        target = open_target(name, settings="shapes/flow_grpo", overrides=overrides)
        found[name] = agreement(judge, target.model, records, args.images, args.steps, args.seed)
        one = found[name]
        print(f"{name}: agreement {one['agreement']:.1%}, judge {one['judge']:.1%}", flush=True)
    settings = {key: getattr(args, key) for key in ("prompts", "images", "steps", "guidance")}
    result = {
        "kind": "flowrl judge agreement",
        "command": shlex.join(["python", *sys.argv]),
        "settings": {**settings, "seed": args.seed},
        "targets": found,
        "environment": environment(),
    }
    write_json(args.out, result)


def agreement(
    judge: Judge, model: FlowModel, records: Sequence[Record], images: int, steps: int, seed: int
) -> dict[str, Any]:
    """Sample `images` images of each prompt, let both judge -> counts and shares."""
    texts = [record["prompt"] for record in records]
    options: dict[str, Any] = {"height": 64, "width": 64, "steps": steps, "seed": seed}
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    for index, pixels in sampled_images(model, texts, images=images, batch=128, **options):
        asked = [records[i] for i in index]
        strict = check(pixels, asked).strict.tolist()
        seen = things_on(judge, pixels.cpu())
        for record, things, checked in zip(asked, seen, strict, strict=True):
            pair = (is_right(things, record), bool(checked))
            pairs.setdefault(str(record["tag"]), []).append(pair)
    everything = [pair for some in pairs.values() for pair in some]
    return {**counted(everything), "tasks": {task: counted(some) for task, some in pairs.items()}}


def counted(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Count pairs of verdicts, the judge's and the checker's."""
    n = len(pairs)
    same = sum(one == other for one, other in pairs)
    return {
        "images": n,
        "agreement": same / n,
        "interval": list(wilson(same, n)),
        "both_right": pairs.count((True, True)),
        "judge_alone": pairs.count((True, False)),
        "checker_alone": pairs.count((False, True)),
        "both_wrong": pairs.count((False, False)),
        "judge": sum(one for one, _ in pairs) / n,
        "checker": sum(other for _, other in pairs) / n,
    }


if __name__ == "__main__":
    main()
