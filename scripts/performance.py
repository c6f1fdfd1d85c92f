"""Measure a config on this machine's GPU, at real size with random weights: seconds by phase,
images/s, MFU, memory.

    python scripts/performance.py sd3/flow_grpo train.prompts=4 --sync-check
    python scripts/performance.py flux/flow_grpo train.prompts=2

Writes assets/results/performance-<model>.json. Nothing is downloaded: the architectures come with
flowrl.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flowrl.config.load import load_config
from flowrl.core.errors import FlowRLError
from flowrl.core.files import write_json
from flowrl.core.tables import terminal_width
from flowrl.cost.throughput import measure, table

RESULTS = Path(__file__).resolve().parent.parent / "assets" / "results"


def main() -> int:
    """Measure, print and write -> exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument(
        "--iterations", type=int, default=2, help="after a warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--vae", action="store_true", help="decode with a VAE of random weights, too"
    )
    parser.add_argument(
        "--sync-check", action="store_true", help="the host must not wait inside the sampling loop"
    )
    parser.add_argument(
        "--json", type=Path, help="default: assets/results/performance-<model>.json"
    )
    args = parser.parse_args()
    # what cannot be measured is a message and exit code 2, not a traceback
    try:
        result = measure(
            load_config(args.config, args.overrides),
            iterations=args.iterations,
            vae=args.vae,
            sync_check=args.sync_check,
        )
        out = args.json or RESULTS / f"performance-{Path(result['model']).name.lower()}.json"
        write_json(out, result)
    except FlowRLError as error:
        print(f"performance: {error}", file=sys.stderr)
        return 2
    print(f"{table(result, width=terminal_width())}\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
