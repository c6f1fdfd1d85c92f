"""Write the prompt lists of the shapes benchmark, in GenEval's schema.

No scene is in two of them: train, validation and test, the same of the harder tier (`hard-`),
`ood.jsonl`, which is out of distribution, and `final.jsonl`, which the table of all methods is
judged by.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from flowrl.evaluation.suites.shapes.lists import (
    Lists,
    benchmark_lists,
    final_list,
    hard_lists,
    ood_list,
)
from flowrl.evaluation.suites.shapes.prompts import Record


def main() -> None:
    """Write all lists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("assets/shapes"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, records in all_lists(args.seed).items():
        write(args.out / f"{name}.jsonl", records)


def all_lists(seed: int) -> dict[str, list[Record]]:
    """Make the lists by the names of their files."""
    found = {}
    for prefix, lists in (("", benchmark_lists(seed)), ("hard-", hard_lists(seed))):
        for name, records in zip(Lists._fields, lists, strict=True):
            found[prefix + name] = records
    return {**found, "ood": ood_list(seed), "final": final_list(seed)}


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a prompt list, and say what is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    held = sum(record["held_out"] for record in records)
    print(f"{path}: {len(records)} prompts, {held} of them with held-out combinations")


if __name__ == "__main__":
    main()
