"""Time an iteration of shapes configs against the calls of network and VAE inside it.

    python scripts/research/bench_plans.py
    python scripts/research/bench_plans.py --only shapes/flow_grpo shapes/branch_grpo

One thread, and the processor's seconds, so that the figures are of the code and not of what else
the machine does. Writes assets/results/bench-shapes-plans.json, config by config: all that the file
has, or those behind `--only`.
`python scripts/research/tables.py` makes two tables of docs/compare.md from it.
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
from flowrl.core.installation import environment
from flowrl.core.tables import fixed_digits
from flowrl.cost.overhead import measure_overhead

ROOT = Path(__file__).resolve().parents[2]
RESULT, PAGE = ROOT / "assets" / "results" / "bench-shapes-plans.json", ROOT / "docs" / "compare.md"
AROUND = ("rewards", "around sampling", "around decoding", "around training")
MARK = re.compile(r"<!-- bench: plans -->\n(?:\|.*\n)*")
FORWARD_MARK = re.compile(r"<!-- bench: forward -->\n(?:\|.*\n)*")


def measure(name: str, iterations: int, here: dict[str, Any]) -> dict[str, Any]:
    """Time one config, in the environment `here`."""
    config = load_config(name, ["train.threads=1"])
    found = measure_overhead(config, iterations=iterations)
    ratio = found["overhead_ratio_without_rewards"]
    print(f"{name}: {found['rollout_ratio']:.3f} {ratio:.3f}", flush=True)
    return {"plan": config.plan.fn, **found, "environment": here}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Show what each config does and where its time goes, the highest overhead last."""
    head = (
        "config",
        "plan",
        "NFE in sampling",
        "states trained",
        "seconds",
        "network and VAE",
        "rewards",
        "around sampling",
        "around decoding",
        "around training",
        "other",
        "overhead",
        "range",
    )
    # two columns of words, then numbers, which stand on the right
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for name, row in sorted(results.items(), key=lambda item: overhead(item[1])):
        # what is inside the calls of network and VAE, and what flowrl adds around them
        shares = row["shares"]
        bare = sum(shares[key] for key in ("network, sampling", "network, training", "VAE"))
        parts = [bare, *(shares[key] for key in AROUND)]
        other = shares["other"] + shares["text encoders"]
        percent = " | ".join(f"{fixed_digits(100 * part, 1)} %" for part in (*parts, other))
        without = row["overhead_ratios_without_rewards"]
        lines.append(
            f"| `{name}` | `{row['plan']}` | {row['nfe']} | {row['states']} | "
            f"{row['seconds']['all']:.2f} | {percent} | {overhead(row):.3f} | "
            f"{min(without):.3f} to {max(without):.3f} |"
        )
    return "\n".join(lines) + "\n"


def forward_table(results: dict[str, dict[str, Any]]) -> str:
    """Show the methods of the forward process over the network's calls alone, the highest last:
    decoding and rewards count as overhead, and stand beside it as shares of the network's time."""
    head = ("config", "over network calls", "VAE", "rewards", "around calls")
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    rows = forward_rows(results)
    for name, row in sorted(rows.items(), key=lambda item: over_network(item[1])):
        shares = row["shares"]
        network = shares["network, sampling"] + shares["network, training"]
        around = sum(shares[key] for key in AROUND[1:])
        parts = (shares["VAE"], shares["rewards"], around)
        percent = " | ".join(f"{fixed_digits(100 * part / network, 1)} %" for part in parts)
        lines.append(f"| `{name}` | {over_network(row):.3f} | {percent} |")
    return "\n".join(lines) + "\n"


def forward_rows(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of methods that noise finished images anew."""
    return {n: row for n, row in results.items() if load_config(n).likelihood.fn == "forward"}


def over_network(row: dict[str, Any]) -> float:
    """Return a whole iteration over its network calls alone."""
    return float(row["overhead_ratio_with_vae"])


def overhead(row: dict[str, Any]) -> float:
    """Return an iteration without its rewards over the calls of network and VAE in it."""
    return float(row["overhead_ratio_without_rewards"])


def filled(text: str, results: dict[str, dict[str, Any]]) -> str:
    """Put both tables behind their marks."""
    text = FORWARD_MARK.sub(lambda _: f"<!-- bench: forward -->\n{forward_table(results)}", text)
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
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", nargs="+", default=[], metavar="CONFIG", help="the others stay")
    args = parser.parse_args()
    found = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    here = environment()  # before the file is written, which changes the checkout
    for name in args.only or sorted(found):
        found[name] = measure(name, args.iterations, here)
        write_json(args.out, dict(sorted(found.items())))


if __name__ == "__main__":
    main()
