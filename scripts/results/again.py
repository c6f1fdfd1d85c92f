"""Work the intervals of gains.json out again, from the outcomes that are beside it.

    python scripts/results/again.py

Rewrites `low` and `high` of assets/results/gains.json from assets/results/gains-outcomes.json; what
was measured stays, until methods.json has the config, too. Run it after a change of
`flowrl/evaluation/crossed_errors.py` and after `methods.py`, then `tables.py`.

gains-outcomes.json holds for each comparison how many images of each prompt were right, a digit a
prompt in base 36: of the base model, and of every seed of every config, since the spread over seeds
may be that of all of them. `rows` are the configs of gains.json that are from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.core.files import write_json
from flowrl.evaluation.crossed_errors import weights_of
from flowrl.runs.compare.summary import ErrorModel, equal_spreads, unpacked

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
GAINS, OUTCOMES = RESULTS / "gains.json", RESULTS / "gains-outcomes.json"
TABLE = RESULTS / "methods.json"
AGREE = 2e-6  # of gains, which are kept with six digits
Found = dict[str, Any]


def read(file: Path) -> Found:
    """Read a JSON file."""
    return dict(json.loads(file.read_text(encoding="utf-8")))


def hits(outcomes: str) -> str:
    """Pack how many images of each prompt were right, from a comparison's outcomes. Raises
    ValueError where they are no verdicts of at most 35 images."""
    prompts = unpacked(outcomes)
    if any(value not in (0, 1) for images in prompts for value in images):
        raise ValueError("expected verdicts, 0 or 1 for each image")
    return "".join(np.base_repr(int(sum(images)), 36).lower() for images in prompts)


def outcomes_of(result: Mapping[str, Any], rows: list[str]) -> Found:
    """Return what gains-outcomes.json keeps of a comparison, for the rows of some of its
    configs."""
    tasks: list[list[Any]] = []
    for tag in result["base"]["tags"]:
        if tasks and tasks[-1][0] == tag:
            tasks[-1][1] += 1
        else:
            tasks.append([tag, 1])
    configs = {}
    for entry in result["configs"]:
        ends = [run["at"]["nfe"] for run in entry["seeds"] if run["at"]["nfe"]]
        failed = sum(run["failed"] is not None for run in entry["seeds"])
        seeds = [hits(end["outcomes"]) for end in ends]
        configs[entry["file"]] = {"seeds": seeds, "failed": failed}
    base = result["base"]["outcomes"]
    return {
        "rows": rows,
        "images": len(unpacked(base)[0]),
        "tasks": tasks,
        "base": hits(base),
        "configs": configs,
    }


def model_of(kept: Mapping[str, Any]) -> ErrorModel:
    """Return the error model of a comparison that is kept so."""

    def shares(digits: str) -> np.ndarray:
        return np.array([int(digit, 36) for digit in digits]) / kept["images"]

    tags = [task for task, count in kept["tasks"] for _ in range(count)]
    groups = {}
    for name, entry in kept["configs"].items():
        if entry["seeds"]:
            groups[name] = np.array([shares(seed) for seed in entry["seeds"]])
    weights = weights_of(tags)
    equal_p = equal_spreads([group @ weights for group in groups.values()])
    return ErrorModel(groups, shares(kept["base"]), tags, True, equal_p)


def gains_again(found: Found, kept: Mapping[str, Any]) -> Found:
    """Return gains.json with intervals worked out again. Raises ValueError where a gain is not that
    of the outcomes."""
    rows = {row["config"]: dict(row) for row in found["rows"]}
    for name, one in kept.items():
        model = model_of(one)
        for config in one["rows"]:
            gain, error = model.gain(config)
            half, row = float(error.half()), rows[config]
            if abs(gain - row["gain"]) > AGREE:
                raise ValueError(f"{config}: gain {row['gain']}, by the outcomes of {name} {gain}")
            known = math.isfinite(half)
            row["low"] = round(gain - half, 6) if known else None
            row["high"] = round(gain + half, 6) if known else None
    return {**found, "rows": list(rows.values())}


def left(found: Found, outcomes: Found, taken: Collection[str]) -> tuple[Found, Found]:
    """Return both files without the configs that the table on equal terms has, and without the
    comparisons of which no other config is shown."""
    rows = [row for row in found["rows"] if row["config"] not in taken]
    kept = {}
    for name, one in outcomes["comparisons"].items():
        shown = [config for config in one["rows"] if config not in taken]
        if shown:
            kept[name] = {**one, "rows": shown}
    return {**found, "rows": rows}, {**outcomes, "comparisons": kept}


def main() -> None:
    """Rewrite the files."""
    taken = {entry["file"] for entry in read(TABLE)["configs"]}
    found, outcomes = left(read(GAINS), read(OUTCOMES), taken)
    write_json(OUTCOMES, outcomes)
    write_json(GAINS, gains_again(found, outcomes["comparisons"]))


if __name__ == "__main__":
    main()
