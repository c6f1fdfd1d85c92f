"""The table of docs/memory.md of what was measured on a GPU, from
assets/results/performance-queue.json, and of a run on shapes, from assets/results/awm-h200.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from flowrl.core.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "assets" / "results", ROOT / "docs" / "memory.md"
TABLE = re.compile(r"<!-- gpu: table -->\n.*?<!-- gpu: end -->", re.DOTALL)
RUN = re.compile(r"<!-- gpu, shapes: sentence -->\n.*?<!-- gpu, shapes: end -->", re.DOTALL)
PHASES = {"rollout": "sampling", "train": "training"}
SHOWN = ("sd3 native", "sd3 large", "flux native", "flux _native_flash", "wan native")
"""Rows of the table; the result file has all."""


def gib(count: int) -> str:
    """Write bytes as GiB."""
    return f"{count / 2**30:.1f}"


def row_of(row: dict[str, Any]) -> list[str]:
    """Say what a row found: batch, seconds, images, MFU, the largest peak and its estimate."""
    if "failed" in row:
        late = row["failed"].removeprefix("ended after ")  # "85 s", where that is what it says
        ended = late != row["failed"]
        why = f"did not end within {late}" if ended else "fails in the backward pass"
        return [f"`{row['row']}`", "", why, "", "", "", "", ""]
    found = row["result"]
    largest = max(
        (found["memory"][phase] for phase in PHASES), key=lambda memory: memory["measured"]
    )
    return [
        f"`{row['row']}`",
        str(found["batches"]["rollout"]),
        *(f"{found['seconds'][phase]:.2f}" for phase in PHASES),
        f"{found['images_per_s']:.1f}",
        ", ".join(f"{found['mfu'][phase]:.2f}" for phase in PHASES),
        gib(largest["measured"]),
        gib(largest["estimate"]),
    ]


def table() -> str:
    """Return the table: a row or two of each model."""
    rows = json.loads((RESULTS / "performance-queue.json").read_text(encoding="utf-8"))["rows"]
    head = ["row", "images a call", "sampling, s", "training, s", "images/s"]
    head += ["MFU of both", "peak, GiB", "estimate"]
    models = [row for row in rows if row["row"] in SHOWN]
    return markdown_table([head, *map(row_of, models)])


def sentence() -> str:
    """Say how long an iteration on shapes took, and how far the run came."""
    found = json.loads((RESULTS / "awm-h200.json").read_text(encoding="utf-8"))
    later = found["timing"][1:]
    seconds = {}
    for name in ("total", "train", "reward"):
        seconds[name] = median(row[name] for row in later)
    first, last = found["eval"][0], found["eval"][-1]
    return (
        f"`{found['command']}` took {seconds['total']:.1f} s an iteration there, of which training "
        f"{seconds['train']:.1f}\nand the checker, on the host, {seconds['reward']:.1f}; after "
        f"{last['iteration']} iterations {100 * last['strict']:.0f} % of the validation prompts "
        f"were right,\nbefore {100 * first['strict']:.0f} % "
        "(`assets/results/awm-h200.json`; the KL's pull was weaker then)."
    )


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the page."""

    def fill(text: str) -> str:
        text = TABLE.sub(lambda _: f"<!-- gpu: table -->\n{table()}\n<!-- gpu: end -->", text)
        begin, end = "<!-- gpu, shapes: sentence -->", "<!-- gpu, shapes: end -->"
        return RUN.sub(lambda _: f"{begin}\n{sentence()}\n{end}", text)

    return [(PAGE, fill)]
