"""Give damaged inputs to everything that reads what strangers write, and count the falls.

    python scripts/bench/fuzz.py                       # 2,500 inputs, about 6 minutes on one core
    python scripts/bench/fuzz.py --cases 100 --out /tmp/fuzz.json
    python scripts/bench/fuzz.py --only runs suites    # these kinds; the others' rows stay

Writes assets/results/fuzz.json: for each kind how many inputs were taken, refused with one message,
or fell: a traceback, a hang, an answer 500, a message that says nothing, or a wrong value. An input
follows from its kind and its number alone, so that every fall can be made again: it is kept with
its number and the end of what was said. A run that was stopped goes on where it was. Exits with 1
if anything fell.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "assets/results/fuzz.json"
SEED = "fuzz 1"
EVERY = 50  # inputs after which the file is written
SAID = 600  # characters of a fall that are kept


def kinds(home: Path) -> dict[str, Any]:
    """Return what makes each target, by kind, as the tests have them."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/kits"), str(ROOT / "tests/runs")]
    from test_fuzz import targets

    return targets(home)


def shares(names: list[str], cases: int) -> dict[str, int]:
    """Deal out the inputs to the kinds, as evenly as it goes."""
    each, rest = divmod(cases, len(names))
    return {name: each + (place < rest) for place, name in enumerate(names)}


def run_kind(target: Any, name: str, row: dict[str, Any], until: int, folder: Path) -> None:
    """Judge up to EVERY further inputs of a kind, and add them to its row."""
    from fuzzkit import judge

    counts = Counter(row["counts"])
    for number in range(row["done"], min(until, row["done"] + EVERY)):
        rng = random.Random(f"{SEED}/{name}/{number}")
        verdict = judge(target, target.damage(rng.choice(target.good), rng), folder)
        counts[verdict.kind] += 1
        row["done"] = number + 1
        if verdict.bad:
            said = verdict.text.replace(str(folder), "FOLDER")[-SAID:]
            row["falls"].append({"number": number, "what": verdict.kind, "said": said})
    row["counts"] = dict(sorted(counts.items()))


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Return the whole file."""
    total: Counter[str] = Counter()
    for row in rows.values():
        total.update(row["counts"])
    falls = sum(len(row["falls"]) for row in rows.values())
    done = sum(row["done"] for row in rows.values())
    return {"seed": SEED, "inputs": done, "falls": falls, "counts": dict(total), "kinds": rows}


def main() -> int:
    """Run what is asked for -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2500, help="inputs in all")
    parser.add_argument("--only", nargs="*", default=[], help="names of kinds")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    # one core, no hub, and no warnings of what damaged files bring along
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from flowrl.core.files import write_json

    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        made = kinds(home)
        strange = [name for name in asked.only if name not in made]
        if strange:
            parser.error(f"--only: expected some of {', '.join(made)}, got {strange[0]}")
        # what an earlier run of the same seed has done
        rows: dict[str, Any] = {}
        if asked.out.is_file():
            before = json.loads(asked.out.read_text(encoding="utf-8"))
            rows = before["kinds"] if before.get("seed") == SEED else {}
        for name, until in shares([*made], asked.cases).items():
            if asked.only and name not in asked.only:
                continue
            row = rows.setdefault(name, {"done": 0, "counts": {}, "falls": []})
            folder = home / f"cases {name}"
            folder.mkdir()
            target = made[name]() if row["done"] < until else None
            while target is not None and row["done"] < until:
                run_kind(target, name, row, until, folder)
                write_json(asked.out, summary(rows))
                print(f"{name}: {row['done']} of {until} {row['counts']}", flush=True)
    falls = summary(rows)["falls"]
    print(f"{summary(rows)['inputs']} inputs, {falls} falls: {asked.out}")
    return 1 if falls else 0


if __name__ == "__main__":
    sys.exit(main())
