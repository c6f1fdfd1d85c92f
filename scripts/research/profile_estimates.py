"""Estimate Flow-GRPO-Fast on released models, and the largest methods on Wan, under the profiles of
cards: peaks with those networks of rewards that are counted.

    python scripts/research/profile_estimates.py --anew    # minutes; assets/results/profiles.json

`python scripts/research/tables.py` makes the table of docs/memory.md from it. A row that is there
is not worked out again, so that a stopped command goes on; --anew begins anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured import between

from flowrl.cli.options import load_fitted
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.tables import markdown_table
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import GIB, PROFILES, limit_of

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "profiles.json", ROOT / "docs" / "memory.md"
FAST = ("sd3", "flux", "flux_kontext", "qwen_image", "z_image", "flux2_klein", "flux2", "wan")
VIDEO = ("wan/flow_grpo_fast_ti2v", "wan/flow_grpo_fast_22", "wan/flow_grpo_fast_i2v")
LARGE = ("wan/branch_grpo", "wan/dance_grpo", "wan/branch_grpo_22", "wan/diffusion_nft_22")
EDIT = "qwen_edit_plus/flow_grpo_fast"
CONFIGS = (*(f"{model}/flow_grpo_fast" for model in FAST), *VIDEO, EDIT, *LARGE)
Row = dict[str, Any]


def row(name: str, profile: str) -> Row:
    """Estimate a config under a profile; `less`: what the profile trains less, if anything."""
    config, plain = load_fitted(name, [], [], profile), load_config(name)
    largest = estimate(config).largest
    assert largest is not None  # all are released models
    runtime, lora = config.model.kwargs["runtime"], config.model.kwargs["lora"] or {}
    before = plain.model.kwargs["lora"] or {}
    less = [f"rank {lora['rank']}"] if lora.get("rank") != before.get("rank") else []
    less += ["8-bit AdamW"] * (config.optimizer.fn != plain.optimizer.fn)
    return {
        "config": name,
        "profile": profile,
        "gib": largest.bytes / GIB,
        "phase": largest.name,
        "fits": largest.bytes <= limit_of(PROFILES[profile].gigabytes),
        "quantize": runtime.get("quantize", "none"),
        "text_encoders": runtime.get("text_encoders", "device"),
        **({"less": less} if less else {}),
    }


def main() -> None:
    """Work out what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true", help="work out every row")
    args = parser.parse_args()
    # the commit, before a changed result file makes it a dirty one
    machine, rows = environment(), list[Row]()
    if RESULT.exists() and not args.anew:
        rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    there = [(one["config"], one["profile"]) for one in rows]
    wanted = [(name, profile) for name in CONFIGS for profile in PROFILES]
    about = {"command": "python scripts/research/profile_estimates.py --anew"}
    for one in wanted:
        if one not in there:
            rows.append(row(*one))
            print(rows[-1], flush=True)
            write_json(RESULT, {**about, "rows": rows, "environment": machine})


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return the page and what fills its table."""
    return [(PAGE, filled)]


def filled(text: str) -> str:
    """Put a row for each config between the marks."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    plain = {(one["config"], one["profile"]): one for one in rows}
    table = [["config", *(f"`{profile}`" for profile in PROFILES)]]
    for name in CONFIGS:
        table.append([f"`{name}`", *(told(plain[name, profile]) for profile in PROFILES)])
    return between(text, "profiles: table", "profiles: end", [markdown_table(table)])


def told(one: Row) -> str:
    """Say a peak, and what the profile did for it."""
    words = [f"{one['gib']:.1f}"]
    words += [one["quantize"]] * (one["quantize"] != "none") + one.get("less", [])
    return ", ".join(words) + ("" if one["fits"] else ": does not fit")


if __name__ == "__main__":
    main()
