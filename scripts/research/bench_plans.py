"""Time an iteration of every shapes config against the calls of network and VAE inside it.

    python scripts/research/bench_plans.py

One thread, so that the figures are of the code and not of how the machine shares its cores. Writes
assets/results/bench-shapes-plans.json; `python scripts/research/tables.py` makes the table of
docs/compare.md from it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.shipped_files import list_configs
from flowrl.cost.overhead import bench

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "bench-shapes-plans.json", ROOT / "docs" / "compare.md"
MARK = re.compile(r"<!-- bench: plans -->\n(?:\|.*\n)*")


def measure(name: str, iterations: int) -> dict[str, Any]:
    """Time one config; the machine is told once, not for each."""
    config = load_config(name, ["train.threads=1"])
    found = bench(config, iterations=iterations)
    print(f"{name}: {found['rollout_ratio']:.3f} {found['overhead_ratio']:.3f}", flush=True)
    return {"plan": config.plan.fn, **found}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Show plan, NFE and the ratios of each config, the highest of sampling last."""
    head = (
        "config",
        "plan",
        "NFE in sampling",
        "states trained",
        "seconds",
        "sampling",
        "range",
        "all",
        "VAE apart",
    )
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in sorted(results.items(), key=lambda item: item[1]["rollout_ratio"]):
        low, high = min(row["rollout_ratios"]), max(row["rollout_ratios"])
        lines.append(
            f"| `{name}` | `{row['plan']}` | {row['nfe']} | {row['states']} | "
            f"{row['seconds']['all']:.2f} | {row['rollout_ratio']:.2f} | {low:.2f} to {high:.2f} | "
            f"{row['overhead_ratio']:.2f} | {row['overhead_ratio_with_vae']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def filled(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Put the table behind the mark."""
    return MARK.sub(lambda _: f"<!-- bench: plans -->\n{table(results)}", text)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the table of docs/compare.md."""
    results = json.loads(RESULT.read_text(encoding="utf-8"))
    return [(PAGE, lambda text: filled(text, results))]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=5)
    args = parser.parse_args()
    shapes = (name for name in list_configs() if name.startswith("shapes/"))
    # adv_grpo has flow_grpo's plan, with a reward that learns
    names = [name for name in shapes if name != "shapes/adv_grpo"]
    write_json(RESULT, {name: measure(name, args.iterations) for name in names})


if __name__ == "__main__":
    main()
