"""Measure a queue of models and settings on this machine's GPU in one call, the most important rows
first, within so many minutes.

    python scripts/performance_queue.py --minutes 12
    python scripts/performance_queue.py --minutes 12 --go-on     # rows that are still missing

Stable Diffusion 3.5 Medium, FLUX.1-dev, Qwen-Image and Wan 2.1 1.3B at real size with random
weights: attention back ends, regional compile without and with CUDA graphs, nf4, whether the
sampling loop waits for the device, and NCCL's collectives in a group of one process. Each row is a
process of its own, so that one that is out of memory takes no other along, and the file is written
after each. A row that has not begun when the time is up is left out and named; one that runs is
ended then, and at the latest after `--most` minutes.

Writes assets/results/performance-queue.json. Nothing is downloaded. On a CPU, with tiny models in
the place of the real ones, as tests/cost/test_performance_queue.py does it:

    python scripts/performance_queue.py --model sd3=tiny.yaml --rows sd3,nccl --out queue.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import read_text, write_json
from flowrl.core.tables import terminal_width, text_table

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "assets" / "results" / "performance-queue.json"
SMALL = ["train.prompts=1", "train.group=8", "train.updates=1", "model.decode_batch=1"]
MODELS = {
    "sd3": ["sd3/flow_grpo_fast", *SMALL],
    "flux": ["flux/flow_grpo_fast", *SMALL],
    "wan": ["wan/flow_grpo_fast", *SMALL],
    "qwen_image": ["qwen_image/flow_grpo_fast", *SMALL],
}
COMPILED = ["model.runtime.compile=true"]
# graphs refuse offload, which configs of large models ask for; no encoder or VAE is there to move
GRAPHS = [*COMPILED, "model.runtime.cuda_graphs=true", "model.runtime.offload=false"]
NF4 = ["model.runtime.quantize=nf4"]
CHECKPOINTING = ["model.runtime.checkpointing=true"]


class Row(NamedTuple):
    """One measurement: a model of MODELS, or none for NCCL's collectives."""

    name: str
    model: str
    settings: list[str]
    options: tuple[str, ...] = ()  # of performance.py


def attend(model: str, name: str, *more: str) -> Row:
    """Return the row of a model with an attention back end."""
    return Row(f"{model} {name}", model, [f"model.runtime.attention={name}", *more])


# Qwen-Image masks the empty tokens of prompts: flash and xformers cannot, flash_varlen can.
QUEUE = [
    attend("sd3", "native"),
    attend("flux", "native", *CHECKPOINTING),
    attend("wan", "native"),
    attend("qwen_image", "native"),
    Row("sd3 sync check", "sd3", ["model.runtime.attention=native"], ("--sync-check",)),
    Row("nccl", "", []),
    attend("flux", "flash", *CHECKPOINTING),
    attend("sd3", "flash"),
    Row("sd3 compiled", "sd3", COMPILED),
    Row("sd3 graphs", "sd3", GRAPHS),
    Row("flux nf4", "flux", [*NF4, *CHECKPOINTING]),
    Row("flux compiled", "flux", [*COMPILED, *CHECKPOINTING]),
    Row("flux graphs", "flux", [*GRAPHS, *CHECKPOINTING]),
    attend("flux", "xformers", *CHECKPOINTING),
    attend("sd3", "xformers"),
    Row("wan compiled", "wan", COMPILED),
    Row("wan graphs", "wan", GRAPHS),
    attend("wan", "flash"),
    attend("wan", "xformers"),
    Row("qwen_image nf4", "qwen_image", NF4),
    attend("qwen_image", "flash_varlen"),
    Row("qwen_image compiled", "qwen_image", COMPILED),
    Row("qwen_image graphs", "qwen_image", GRAPHS),
    Row("wan sync check", "wan", ["model.runtime.attention=native"], ("--sync-check",)),
    Row("flux sync check", "flux", CHECKPOINTING, ("--sync-check",)),
]


def command_of(row: Row, models: dict[str, list[str]], out: Path) -> list[str]:
    """Return the command line of a row, which writes `out`."""
    if not row.model:
        return [sys.executable, str(HERE / "collectives.py"), "--out", str(out)]
    measure = [sys.executable, str(HERE / "performance.py"), *models[row.model], *row.settings]
    return [*measure, *row.options, "--iterations", "1", "--json", str(out)]


def run(row: Row, models: dict[str, list[str]], seconds: float) -> dict[str, Any]:
    """Run a row in a process of its own for at most so long -> its figures, or why there are
    none."""
    began = time.monotonic()
    found: dict[str, Any] = {"row": row.name, "settings": row.settings}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        try:
            done = subprocess.run(
                command_of(row, models, out),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return found | {"failed": f"ended after {seconds:.0f} s", "wall_s": round(seconds, 1)}
        found["wall_s"] = round(time.monotonic() - began, 1)
        if done.returncode == 0 and out.is_file():
            return found | {"result": json.loads(read_text(out))}
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return found | {"failed": said[-1] if said else f"exit code {done.returncode}"}


def measured(out: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier call that have figures. Raises ConfigError for another file."""
    if not out.is_file():
        return []
    try:
        return [row for row in json.loads(read_text(out))["rows"] if "result" in row]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--go-on: {out}: expected a file that this command wrote: {error!r}; move it away, or "
            "leave --go-on out"
        ) from error


def through(args: argparse.Namespace, rows: list[Row], models: dict[str, list[str]]) -> int:
    """Run rows until the time is up, and write the file after each -> how many have figures."""
    began = time.monotonic()
    kept = measured(args.out) if args.go_on else []
    there = {one["row"] for one in kept}
    for row in [row for row in rows if row.name not in there]:
        left = 60 * args.minutes - (time.monotonic() - began)
        if left <= 0:
            break
        one = run(row, models, min(left, 60 * args.most))
        print(f"{row.name}, {one['wall_s']} s: {one.get('failed', 'measured')}", flush=True)
        kept.append(one)
        tried = {one["row"] for one in kept}
        missing = [row.name for row in rows if row.name not in tried]
        # each row has its own environment; asked for here it would open the device
        write_json(args.out, {"rows": kept, "left_out": missing})
    print(f"\n{table(kept)}\n{args.out}")
    return sum("result" in one for one in kept)


def table(rows: list[dict[str, Any]]) -> str:
    """Set the rows beside each other: seconds, images a second, MFU, peak and estimate in GiB."""
    lines = [["row", "rollout, s", "train, s", "images/s", "MFU", "peak", "estimated"]]
    for row in rows:
        result = row.get("result", {})
        if "seconds" not in result:
            what = row.get("failed", result.get("said", ""))
            lines.append([row["row"], what[:60], "", "", "", "", ""])
            continue
        mfu, memory = result["mfu"] or {}, result["memory"].values()
        shares = [f"{mfu[name]:.2f}" for name in ("rollout", "train") if name in mfu]
        sizes = []
        for kind in ("measured", "estimate"):
            most = max((one[kind] for one in memory if one["measured"] and one[kind]), default=None)
            sizes.append(f"{most / 2**30:.1f}" if most else "")
        times = [f"{result['seconds'][phase]:.2f}" for phase in ("rollout", "train")]
        lines.append(
            [row["row"], *times, f"{result['images_per_s']:.2f}", ", ".join(shares), *sizes]
        )
    return text_table(lines, width=terminal_width())


def chosen(args: argparse.Namespace) -> tuple[list[Row], dict[str, list[str]]]:
    """Return the rows that were asked for, and the config and overrides of each model. Raises
    ConfigError."""
    models = dict(MODELS)
    for text in args.model:
        name, _, config = text.partition("=")
        if name not in MODELS or not config:
            raise ConfigError(f"--model: expected {'|'.join(MODELS)}=CONFIG, got {text!r}")
        models[name] = [config, *MODELS[name][1:]]
    starts = tuple(args.rows.split(","))
    rows = [row for row in QUEUE if row.name.startswith(starts)]
    if not rows:
        names = ", ".join(row.name for row in QUEUE)
        raise ConfigError(f"--rows: no row begins with {args.rows!r}; there are {names}")
    return rows, models


def main() -> int:
    """Measure, print and write -> exit code: 1 if no row has figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12, help="in all (default: %(default)s)")
    parser.add_argument("--most", type=float, default=4, help="of one row (default: %(default)s)")
    parser.add_argument("--go-on", action="store_true", help="keep what the file has figures of")
    parser.add_argument("--rows", default="", help="those whose names begin so, with commas")
    parser.add_argument(
        "--model", action="append", default=[], help="NAME=CONFIG, another config of a model"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    args = parser.parse_args()
    try:
        return 0 if through(args, *chosen(args)) else 1
    except FlowRLError as error:
        print(f"performance_queue: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
