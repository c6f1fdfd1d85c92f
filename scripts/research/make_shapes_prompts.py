"""Write the prompt lists of the shapes benchmark: assets/shapes/train.jsonl and test.jsonl, in
GenEval's schema."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flowrl.evaluation.suites.shapes.prompts import split_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("assets/shapes"))
    parser.add_argument(
        "--per-task", type=int, default=24, help="test prompts of each task, at most"
    )
    parser.add_argument(
        "--train-per-task", type=int, default=60, help="training prompts of each task, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, records in zip(
        ("train", "test"), split_records(args.per_task, args.train_per_task, args.seed), strict=True
    ):
        (args.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in records), encoding="utf-8"
        )
        held = sum(r["held_out"] for r in records)
        print(
            f"{args.out / name}.jsonl: {len(records)} prompts, {held} of them with held-out "
            "combinations"
        )


if __name__ == "__main__":
    main()
