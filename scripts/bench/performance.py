"""Measure a config on this machine's GPU, at real size with random weights: seconds by phase,
images/s, MFU, memory.

    python scripts/bench/performance.py sd3/flow_grpo train.prompts=4 --sync-check
    python scripts/bench/performance.py flux/flow_grpo train.prompts=2
    python scripts/bench/performance.py sd3/flow_grpo --kernels       # where the device's time goes
    python scripts/bench/performance.py sd3/flow_grpo --attention native,flash --compile all

With several attention back ends or ways to compile, every setting is measured in turn, each in a
process of its own, so that none finds what another left in memory; the file has a row for each,
also for one that cannot run here. Its other figures are those of the first that can.

Writes assets/results/performance-<model>.json. Nothing is downloaded: the architectures come with
flowrl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from throughput import measure_throughput, throughput_table

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import write_json
from flowrl.core.tables import terminal_width, text_table

RESULTS = Path(__file__).resolve().parents[2] / "assets" / "results"
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


_ON = "model.runtime.compile=true"
COMPILE = {
    "off": ["model.runtime.compile=false"],
    "on": [_ON],
    "graphs": [_ON, "model.runtime.cuda_graphs=true"],
}
SEVERAL = {"both": "off,on", "all": "off,on,graphs"}


def settings_of(args: argparse.Namespace) -> list[list[str]]:
    """Return the overrides of every setting; one without any where nothing is compared."""
    backends = [name for name in (args.attention or "").split(",") if name]
    attention = [[f"model.runtime.attention={name}"] for name in backends] or [[]]
    compiled = [COMPILE[way] for way in args.compile] or [[]]
    return [one + other for one, other in itertools.product(attention, compiled)]


def ways(text: str) -> list[str]:
    """Read `--compile`. Raises ArgumentTypeError for what is not in COMPILE."""
    found = SEVERAL.get(text, text).split(",")
    if unknown := [way for way in found if way not in COMPILE]:
        known = ", ".join([*COMPILE, *SEVERAL])
        raise argparse.ArgumentTypeError(f"expected some of {known}, got {unknown[0]!r}")
    return found


def reason(stderr: str) -> str:
    """Return why a process ended, of what it said: the last line that begins with the name of an
    error, or else its last line; "" for nothing. A CUDA error has lines of advice after its own."""
    lines = stderr.strip().splitlines()
    named = [line for line in lines if ERROR.match(line)]
    return "".join((named or lines)[-1:])


def in_turn(args: argparse.Namespace, settings: list[list[str]]) -> dict[str, Any]:
    """Measure each setting in a process of its own -> the figures of the first that runs, and
    `settings`, a row for each. Raises ConfigError with all reasons if none runs."""
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for overrides in settings:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [sys.executable, __file__, args.config, *args.overrides, *overrides]
            command += ["--iterations", str(args.iterations), "--json", str(out)]
            command += ["--vae"] * args.vae + ["--sync-check"] * args.sync_check
            command += ["--kernels"] * args.kernels
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            row: dict[str, Any] = {"setting": overrides}
            if done.returncode or not out.is_file():
                said = reason(done.stderr.decode(errors="replace"))
                row["failed"] = said or f"exit code {done.returncode}"
            else:
                one = json.loads(out.read_text(encoding="utf-8"))
                found = found or one
                row |= {name: one[name] for name in ("seconds", "images_per_s", "mfu", "memory")}
        rows.append(row)
        print(f"{' '.join(overrides)}: {row.get('failed') or row['images_per_s']}", flush=True)
    if not found:
        reasons = [f"{' '.join(row['setting'])}: {row['failed']}" for row in rows]
        raise ConfigError("no setting runs here:\n  " + "\n  ".join(reasons))
    return {**found, "settings": rows}


def compared(rows: list[dict[str, Any]]) -> str:
    """Set the settings beside each other, as a table."""
    lines = [["setting", "rollout, s", "train, s", "images/s", "MFU", "peak, GiB"]]
    for row in rows:
        name = " ".join(row["setting"]).replace("model.runtime.", "")
        if "failed" in row:
            lines.append([name, f"cannot: {row['failed'][:60]}", "", "", "", ""])
            continue
        seconds, mfu = row["seconds"], row["mfu"] or {}
        peaks = [one["measured"] for one in row["memory"].values() if one["measured"]]
        shares = [f"{mfu[name]:.2f}" for name in ("rollout", "train") if name in mfu]
        peak = f"{max(peaks) / 2**30:.1f}" if peaks else ""
        speed = f"{row['images_per_s']:.2f}"
        times = [f"{seconds[phase]:.2f}" for phase in ("rollout", "train")]
        lines.append([name, *times, speed, ", ".join(shares), peak])
    return text_table(lines, width=terminal_width())


def described() -> argparse.ArgumentParser:
    """Describe the command."""
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
        "--kernels",
        action="store_true",
        help="profile an iteration more: seconds of products, attention, what is done element by "
        "element, and of none of them",
    )
    parser.add_argument(
        "--attention", help="back ends to compare, with commas, such as native,flash,xformers"
    )
    parser.add_argument(
        "--compile",
        type=ways,
        default=[],
        help="regional compile: off, on, graphs (with CUDA graphs), with commas; or both, all",
    )
    parser.add_argument(
        "--json", type=Path, help="default: assets/results/performance-<model>.json"
    )
    return parser


def main() -> int:
    """Measure, print and write -> exit code."""
    args = described().parse_args()
    # what cannot be measured is a message and exit code 2, not a traceback
    try:
        settings = settings_of(args)
        if len(settings) > 1:
            result = in_turn(args, settings)
        else:
            result = measure_throughput(
                load_config(args.config, [*args.overrides, *settings[0]]),
                iterations=args.iterations,
                vae=args.vae,
                sync_check=args.sync_check,
                kernels=args.kernels,
            )
        out = args.json or RESULTS / f"performance-{Path(result['model']).name.lower()}.json"
        write_json(out, result)
    except FlowRLError as error:
        print(f"performance: {error}", file=sys.stderr)
        return 2
    print(throughput_table(result, width=terminal_width()))
    if "settings" in result:
        print(f"\n{compared(result['settings'])}")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
