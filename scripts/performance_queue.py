"""Measure a queue of models and settings on this machine's GPU in one call, the most important rows
first, within so many minutes.

    python scripts/performance_queue.py --minutes 12
    python scripts/performance_queue.py --minutes 12 --go-on     # rows that are still missing
    python scripts/performance_queue.py --minutes 12 --anew      # all rows, in the file's place
    python scripts/performance_queue.py --minutes 12 --warm "sd3 compiled,flux compiled"

Stable Diffusion 3.5 Medium, FLUX.1-dev, Qwen-Image and Wan 2.1 1.3B at real size with random
weights: attention back ends, regional compile without and with CUDA graphs, nf4, whether the
sampling loop waits for the device, and NCCL's collectives in a group of one process. Each row is a
process of its own, so that one that is out of memory takes no other along, and the file is written
after each. A row that has not begun when the time is up is left out and named; one that runs is
ended then, and at the latest after `--most` minutes. A file that is there is refused without
`--go-on` or `--anew`. With `--go-on` a row is measured again if it failed, or if its figures are of
another command line or config file, GPU, CUDA, torch, diffusers or commit; uncommitted changes are
not told from each other.

What torch compiles it keeps in a folder of the machine. With `--warm` rows run at once first, for
at most `--warm-minutes` and without being measured, so that a compiled row finds its kernels there.

Writes assets/results/performance-queue.json. Nothing is downloaded. On a CPU, with tiny models in
the place of the real ones, as tests/cost/test_performance_queue.py does it:

    python scripts/performance_queue.py --model sd3=tiny.yaml --rows sd3,nccl --out queue.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from queue_list import MODELS, QUEUE, Row
from queue_process import Process, reason
from queue_rows import difference, earlier_rows

from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import read_text, write_json
from flowrl.core.tables import terminal_width, text_table

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "assets" / "results" / "performance-queue.json"
CORES = 8  # of a processor that can start a process without slowing the one that measures
ASK = (
    "import json; from flowrl.core.installation import environment; "
    "print(json.dumps(environment()))"
)


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


def begin(row: Row, models: dict[str, list[str]], *, waits: bool = False) -> Process:
    """Begin the process of a row; one that `waits` does not measure yet."""
    script = "bench/performance.py" if row.model else "collectives.py"
    option = "--json" if row.model else "--out"
    return Process(script, words_of(row, models), option, waits=waits)


def run(row: Row, models: dict[str, list[str]], process: Process, seconds: float) -> dict[str, Any]:
    """Let a row measure for at most so long -> its figures, and why it failed.

    A row that fails keeps what it had written until then, such as the numbers of a wrong sum.
    """
    found: dict[str, Any] = {"row": row.name, **asked_for(row, models)}
    found["wall_s"], failed = process.finish(seconds)
    # keep what there is, however it ended
    if process.out.is_file():
        found["result"] = json.loads(read_text(process.out))
    if not failed:
        return found
    found["stderr"] = process.told()
    said = found.get("result", {}).get("said")
    return found | {"failed": f"{said}; {failed}" if said else failed}


def warm(rows: list[Row], models: dict[str, list[str]], seconds: float) -> None:
    """Let rows compile side by side, for at most so long together; their figures are thrown
    away."""
    ends = time.monotonic() + seconds
    together = [(row, begin(row, models)) for row in rows]
    for row, process in together:
        _, failed = process.finish(max(0.0, ends - time.monotonic()))
        print(f"{row.name}, warm: {failed or 'compiled'}", flush=True)
        if failed:
            print("\n".join(process.told()), flush=True)


def still_good(
    kept: list[dict[str, Any]], rows: list[Row], models: dict[str, list[str]]
) -> set[str]:
    """Return the names of rows whose earlier figures count, and say of the others why not."""
    if not kept:
        return set()
    # in a process of its own: what asks for the GPU's name opens the device and takes memory of it
    told = subprocess.run([sys.executable, "-c", ASK], capture_output=True)
    if told.returncode:
        said = told.stderr.decode(errors="replace")
        raise ConfigError(f"--go-on: where is this? no answer: {reason(said)}")
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


class Early:
    """The processes of the rows: where there are cores to spare the next one begins while a row
    measures, and waits for its turn."""

    def __init__(self, rows: list[Row], models: dict[str, list[str]]) -> None:
        self.rows, self.models = list(rows), models
        self.ahead = (os.cpu_count() or 1) >= CORES
        self.waiting: tuple[Row, Process] | None = None

    def turn(self, row: Row) -> Process:
        """Return the process of a row, whose turn it is, and begin the one after it."""
        mine, self.waiting = self.waiting, None
        process = mine[1] if mine and mine[0] == row else begin(row, self.models)
        after = self.rows[self.rows.index(row) + 1 :][:1]
        if self.ahead and after and after[0].model:
            self.waiting = after[0], begin(after[0], self.models, waits=True)
        return process

    def __enter__(self) -> Early:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the one that waits, however it ended: else it would begin to measure."""
        if self.waiting:
            self.waiting[1].end()


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
    todo = [row for row in rows if row.name not in done]
    starts = tuple(filter(None, args.warm.split(",")))
    warm([row for row in todo if row.name.startswith(starts)], models, 60 * args.warm_minutes)
    with Early(todo, models) as early:
        for row in todo:
            left = 60 * args.minutes - (time.monotonic() - began)
            if left <= 0:
                break
            one = run(row, models, early.turn(row), min(left, 60 * args.most))
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
    parser.add_argument("--warm", default="", help="rows that compile first, as for --rows")
    parser.add_argument(
        "--warm-minutes", type=float, default=4, help="of all of them (default: %(default)s)"
    )
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
