"""Time an iteration of every shapes config against its own network calls made bare, and write result file and table.

    python scripts/bench_plans.py

One thread, so that the figures are of the code and not of how the machine shares its cores. Writes
assets/results/bench-shapes-plans.json and the table behind the mark in docs/compare.md; `--table`: only the table.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from flowrl.bench import bench
from flowrl.config import load_config
from flowrl.loop import write_json
from flowrl.resources import list_configs

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = ROOT / "assets" / "results" / "bench-shapes-plans.json", ROOT / "docs" / "compare.md"
MARK = re.compile(r"<!-- bench: plans -->\n(?:\|.*\n)*")


def measure(name: str, iterations: int) -> dict[str, Any]:
    """Time one config; the machine is told once, not for each."""
    config = load_config(name, ["train.threads=1"])
    found = bench(config, iterations=iterations)
    print(f"{name}: {found['rollout_ratio']:.3f} {found['overhead_ratio']:.3f}", flush=True)
    return {"plan": config.plan.fn, **found}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Show plan, network calls and the ratios of each config, the highest of sampling last."""
    head = ("config", "plan", "calls in sampling", "states trained", "seconds", "sampling", "range", "all", "VAE apart")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in sorted(results.items(), key=lambda item: item[1]["rollout_ratio"]):
        low, high = min(row["rollout_ratios"]), max(row["rollout_ratios"])
        lines.append(
            f"| `{name}` | `{row['plan']}` | {row['velocity_evaluations']} | {row['states']} | "
            f"{row['seconds']['all']:.2f} | {row['rollout_ratio']:.2f} | {low:.2f} to {high:.2f} | "
            f"{row['overhead_ratio']:.2f} | {row['overhead_ratio_with_vae']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def filled(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Put the table behind the mark."""
    return MARK.sub(lambda _: f"<!-- bench: plans -->\n{table(results)}", text)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="only write the table of the result file that is there")
    args = parser.parse_args()
    if not args.table:
        shapes = (name for name in list_configs() if name.startswith("shapes/"))
        names = [name for name in shapes if name != "shapes/adv_grpo"]  # flow_grpo's plan, with a reward that learns
        write_json(RESULT, {name: measure(name, args.iterations) for name in names})
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), json.loads(RESULT.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
