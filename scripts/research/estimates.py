"""Estimate the shipped configs for released models.

    python scripts/research/estimates.py                          # all of them
    python scripts/research/estimates.py --only flux/flow_grpo    # these; the rest stays as it is

Writes assets/results/estimates.json; `python scripts/research/tables.py` makes the table of
docs/memory.md from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from flowrl.core.files import write_json
from flowrl.cost.table import estimate_configs, merged, put_into_page, released_configs

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "estimates.json", ROOT / "docs" / "memory.md"
SHOWN = (
    "sd15/ddpo",
    "sdxl/spo",
    "sd3/flow_grpo_fast",
    "sd3/flow_grpo",
    "flux/flow_grpo_fast",
    "flux/mix_grpo",
    "flux_kontext/flow_grpo_fast",
    "flux2/flow_grpo_fast",
    "flux2_klein/flow_grpo_fast",
    "qwen_image/flow_grpo_fast",
    "qwen_edit_plus/flow_grpo_fast",
    "z_image/flow_grpo_fast",
    "wan/flow_grpo_fast",
    "wan/flow_grpo_fast_22",
    "wan/flow_grpo_fast_i2v",
)
"""Configs of the table; the result file has all."""


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the table of docs/memory.md: a small config of each model, and those that
    train all weights or the largest network."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    results["configs"] = {name: results["configs"][name] for name in SHOWN}
    return [(PAGE, lambda text: put_into_page(text, results))]


def main() -> None:
    """Estimate all configs, or add and refresh those that are named."""
    parser = argparse.ArgumentParser(description="Estimate the shipped configs.")
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="such as flux/flow_grpo")
    names = parser.parse_args().only
    result = estimate_configs(names or released_configs())
    if names:
        result = merged(json.loads(RESULT.read_text(encoding="utf-8")), result)
    write_json(RESULT, result)
    print(f"{RESULT}; now run python scripts/research/tables.py")


if __name__ == "__main__":
    main()
