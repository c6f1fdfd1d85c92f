"""Work out again what demonstration.json says of its outcomes: means, intervals, tasks, and gains.

    python scripts/results/demonstration/summaries.py

Writes the file anew where its statistics are not those of this version; nothing is measured.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

from demonstration import combinations
from demonstration_measure import crossed_shares, gain
from variety import OPEN, kept

from flowrl.core.files import write_json
from flowrl.runs.compare.summary import unpacked

FILE = Path("assets/results/demonstration.json")
GAIN = "_minus_"


def measured(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements of a setting, one per training seed, as the bench keeps them."""
    setting = {"prompts": entry["prompts"]}
    return [{"outcomes": unpacked(text), "setting": setting} for text in entry["outcomes"]]


def settings_again(result: dict[str, Any]) -> dict[str, Any]:
    """Return settings with outcomes, and gains of one over another, worked out again; anything else
    as it is."""
    again = copy.deepcopy(result)
    runs = {key: measured(value) for key, value in result.items() if _has_outcomes(value)}
    # each setting by itself
    for name, found in runs.items():
        images = sum(len(some) for one in found for some in one["outcomes"])
        again[name] |= {**crossed_shares(found), "images": images}
    # gains, scene by scene
    for name in [name for name in result if GAIN in name]:
        one, _, other = name.partition(GAIN)
        if one in runs and other in runs:
            again[name] = gain(runs[one], runs[other])
    return again


def summarized(result: dict[str, Any]) -> dict[str, Any]:
    """Return a demonstration's result with every number that follows from its outcomes, and from
    its seeds' variety, worked out again."""
    again = settings_again(result)
    for value in filter(_has_outcomes, again.values()):
        value |= {"seeds": len(value["outcomes"]), "combinations": combinations(measured(value))}
    # the variety that a setting has kept, from the shares of its seeds
    for name, some in result["diversity_kept"].items():
        shares = zip(*(some[key]["seeds"] for key in OPEN), strict=True)
        each = [dict(zip(OPEN, one, strict=True)) for one in shares]
        again["diversity_kept"][name] = kept(each, dict.fromkeys(OPEN, 1.0))
    return again


def _has_outcomes(value: Any) -> bool:
    return isinstance(value, dict) and "outcomes" in value


def main() -> None:
    """Write the file anew where it differs."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    result = json.loads(file.read_text(encoding="utf-8"))
    again = summarized(result)
    print(f"{file}: {'as it was' if again == result else 'written anew'}")
    if again != result:
        write_json(file, again)


if __name__ == "__main__":
    main()
