"""Measure a queue of models and settings on this machine's GPU in one call, the most important rows
first, within so many minutes.

    python scripts/performance_queue.py --minutes 12
    python scripts/performance_queue.py --minutes 12 --go-on     # rows that are still missing
    python scripts/performance_queue.py --minutes 12 --anew      # all rows, in the file's place

Stable Diffusion 3.5 Medium, FLUX.1-dev, Qwen-Image and Wan 2.1 1.3B at real size with random
weights: attention back ends, regional compile without and with CUDA graphs, nf4, whether the
sampling loop waits for the device, and NCCL's collectives in a group of one process. Each row is a
process of its own, so that one that is out of memory takes no other along, and the file is written
after each. A row that has not begun when the time is up is left out and named; one that runs is
ended then, and at the latest after `--most` minutes. A file that is there is refused without
`--go-on` or `--anew`. With `--go-on` a row is measured again if it failed, or if its figures are of
another command line or config file, GPU, CUDA, torch, diffusers or commit; uncommitted changes are
not told from each other.

Writes assets/results/performance-queue.json. Nothing is downloaded. On a CPU, with tiny models in
the place of the real ones, as tests/cost/test_performance_queue.py does it:

    python scripts/performance_queue.py --model sd3=tiny.yaml --rows sd3,nccl --out queue.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from queue_rows import difference, earlier_rows

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
NATIVE = ["model.runtime.attention=native"]
CHECKPOINTING = ["model.runtime.checkpointing=true"]
ASK = (
    "import json; from flowrl.core.environment import environment; print(json.dumps(environment()))"
)


class Row(NamedTuple):
    """One measurement: a model of MODELS, or none for NCCL's collectives."""

    name: str
    model: str
    settings: list[str]
    options: tuple[str, ...] = ()  # of performance.py


def attend(model: str, name: str, *more: str) -> Row:
    """Return the row of a model with an attention back end."""
    return Row(f"{model} {name}", model, [f"model.runtime.attention={name}", *more])


# What diffusers calls _native_flash and _native_cudnn are PyTorch's own kernels of these names, of
# which `native` takes one; `flash` is the package flash-attn.
# Qwen-Image masks the empty tokens of prompts: flash and xformers cannot, flash_varlen can.
QUEUE = [
    attend("sd3", "native"),
    attend("flux", "native", *CHECKPOINTING),
    attend("wan", "native"),
    attend("qwen_image", "native"),
    Row("sd3 sync check", "sd3", NATIVE, ("--sync-check",)),
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
    attend("sd3", "_native_flash"),
    attend("sd3", "_native_cudnn"),
    attend("flux", "_native_cudnn", *CHECKPOINTING),
    Row("wan compiled", "wan", COMPILED),
    Row("wan graphs", "wan", GRAPHS),
    attend("wan", "flash"),
    attend("wan", "xformers"),
    Row("qwen_image nf4", "qwen_image", NF4),
    attend("qwen_image", "flash_varlen"),
    Row("qwen_image compiled", "qwen_image", COMPILED),
    Row("qwen_image graphs", "qwen_image", GRAPHS),
    Row("wan sync check", "wan", NATIVE, ("--sync-check",)),
    Row("flux sync check", "flux", [*NATIVE, *CHECKPOINTING], ("--sync-check",)),
]


def words_of(row: Row, models: dict[str, list[str]]) -> list[str]:
    """Return what a row gives to its script: config, settings and options; [] for collectives."""
    if not row.model:
        return []
    return [*models[row.model], *row.settings, *row.options, "--iterations", "1"]


def asked_for(row: Row, models: dict[str, list[str]]) -> dict[str, Any]:
    """Return what a row's figures depend on beside the machine: its words, and the SHA-256 of a
    config that is a file of one's own."""
    config = Path(models[row.model][0]) if row.model else None
    own = config is not None and config.is_file()
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config and own else None
    return {"settings": row.settings, "words": words_of(row, models), "config_sha256": digest}


def last_line(stderr: bytes) -> str:
    """Return the last line of what a process said, which is why it ended; "" for nothing."""
    return "".join(stderr.decode(errors="replace").strip().splitlines()[-1:])


def run(row: Row, models: dict[str, list[str]], seconds: float) -> dict[str, Any]:
    """Run a row in a process of its own for at most so long -> its figures, and why it failed.

    A row that fails keeps what it had written until then, such as the numbers of a wrong sum.
    """
    began = time.monotonic()
    found: dict[str, Any] = {"row": row.name, **asked_for(row, models)}
    script = HERE / ("performance.py" if row.model else "collectives.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        last = ["--json" if row.model else "--out", str(out)]
        # run it, and note how it ended
        failed = ""
        try:
            done = subprocess.run(
                [sys.executable, str(script), *words_of(row, models), *last],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            failed = f"ended after {seconds:.0f} s"
        else:
            if done.returncode or not out.is_file():
                failed = last_line(done.stderr) or f"exit code {done.returncode}"
        found["wall_s"] = round(time.monotonic() - began, 1)
        # keep what there is, however it ended
        if out.is_file():
            found["result"] = json.loads(read_text(out))
    if not failed:
        return found
    said = found.get("result", {}).get("said")
    return found | {"failed": f"{said}; {failed}" if said else failed}


def still_good(
    kept: list[dict[str, Any]], rows: list[Row], models: dict[str, list[str]]
) -> set[str]:
    """Return the names of rows whose earlier figures count, and say of the others why not."""
    if not kept:
        return set()
    # in a process of its own: what asks for the GPU's name opens the device and takes memory of it
    told = subprocess.run([sys.executable, "-c", ASK], capture_output=True)
    if told.returncode:
        raise ConfigError(f"--go-on: where is this? no answer: {last_line(told.stderr)}")
    here, good = json.loads(told.stdout), set()
    for row in rows:
        for one in kept:
            if one["row"] != row.name:
                continue
            if why := difference(one, asked_for(row, models), here):
                print(f"{row.name}: measured again: {why}", flush=True)
            else:
                good.add(row.name)
    return good


def through(args: argparse.Namespace, rows: list[Row], models: dict[str, list[str]]) -> int:
    """Run rows until the time is up, and write the file after each -> how many have figures.

    Raises ConfigError for a file that is there, without a word on what becomes of it.
    """
    # an earlier row stays until another takes its place
    if args.out.exists() and not (args.go_on or args.anew):
        raise ConfigError(
            f"--out: {args.out} is there: --go-on keeps its rows and measures what is missing, "
            "--anew measures all rows anew in its place"
        )
    began = time.monotonic()
    kept = earlier_rows(args.out) if args.go_on else []
    done = still_good(kept, rows, models)
    tried = set(done)
    # measure what has no figures of what is asked for here
    for row in [row for row in rows if row.name not in done]:
        left = 60 * args.minutes - (time.monotonic() - began)
        if left <= 0:
            break
        one = run(row, models, min(left, 60 * args.most))
        print(f"{row.name}, {one['wall_s']} s: {one.get('failed', 'measured')}", flush=True)
        kept = [*(old for old in kept if old["row"] != row.name), one]
        tried.add(row.name)
        done |= set() if "failed" in one else {row.name}
        missing = [row.name for row in rows if row.name not in tried]
        # each row has its own environment; asked for here it would open the device
        write_json(args.out, {"rows": kept, "left_out": missing})
    print(f"\n{table(kept)}\n{args.out}")
    return len(done)


def table(rows: list[dict[str, Any]]) -> str:
    """Set the rows beside each other: seconds, images a second, MFU, peak and estimate in GiB."""
    lines = [["row", "rollout, s", "train, s", "images/s", "MFU", "peak", "estimated"]]
    for row in rows:
        result = row.get("result") or {}
        if "failed" in row or "seconds" not in result:
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
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--go-on", action="store_true", help="keep what the file has figures of")
    there.add_argument("--anew", action="store_true", help="measure all rows in the file's place")
    parser.add_argument("--rows", default="", help="those whose names begin so, with commas")
    parser.add_argument(
        "--model", action="append", default=[], help="NAME=CONFIG, another config of a model"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    args = parser.parse_args()
    try:
        return 0 if through(args, *chosen(args)) else 1
    except (FlowRLError, OSError) as error:
        print(f"performance_queue: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
