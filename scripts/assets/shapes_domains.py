"""Write the prompts of two domains of shapes, for the teachers of shapes/flow_opd.

    python scripts/assets/shapes_domains.py --out data

`layout` has the prompts that say where things are, or which of two has which colour; `objects` has
the others. Of each the training and the validation list are written: layout-train.jsonl and so on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flowrl.core.files import write_text
from flowrl.core.shipped_files import resource

LAYOUT = ("position", "color_attr")


def main() -> None:
    """Split both lists by the task of each prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation"):
        lines = Path(resource(f"assets/shapes/{part}.jsonl")).read_text(encoding="utf-8")
        domains: dict[str, list[str]] = {"layout": [], "objects": []}
        for line in lines.splitlines():
            name = "layout" if json.loads(line)["tag"] in LAYOUT else "objects"
            domains[name].append(line)
        for name, kept in domains.items():
            file = given.out / f"{name}-{part}.jsonl"
            write_text(file, "\n".join(kept) + "\n")
            print(f"{file}: {len(kept)} prompts")


if __name__ == "__main__":
    main()
