"""Tables of what was measured beside gains: the doctor's findings, speed, memory, other trainers.

Each part fills the pages of docs/ that have its two marks, from a file of assets/results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from figures import between, fixed, wrapped

from flowrl.core.tables import markdown_table
from flowrl.doctor.findings import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
GPU = {"rollout": "sampling", "train": "training"}
SHOWN = ("sd3 native", "sd3 large", "flux native", "flux _native_flash", "wan native")
Result = dict[str, Any]


def read(name: str) -> Result:
    """Read a result file."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------------- the doctor


def findings() -> str:
    """Show the catalogue of the doctor's findings, a row for each kind."""
    kinds: dict[str, list[str]] = {}
    for name, one in CATALOGUE.items():
        kinds.setdefault(name.partition("/")[0], []).append(f"`{name}`: {one.means}")
    rows = [[kind, "; ".join(said)] for kind, said in kinds.items()]
    return markdown_table([["kind", "finding, and what it means"], *rows], left=2)


# ------------------------------------------------------------------------- beside other trainers


def side_by_side() -> str:
    """Show what flowrl takes of the seconds and of the peak memory of public trainers."""
    rows = [["beside", "images, steps", "dtype", "time", "memory", "own calls: time", "memory"]]
    for file in sorted(RESULTS.glob("side-by-side-*.json")):
        result = read(file.stem)
        work = result["work"]
        changed = ", changed" if result["commit"].endswith("-dirty") else ""
        row = [f"`{result['trainer']}` at {result['commit'][:8]}{changed}"]
        row += [f"{work['prompts'] * work['group']}, {work['steps']}", work["dtype"]]
        for name in ("flowrl", "flowrl, own batches"):
            shares = result["ratios"][name]
            row += [fixed(shares["all"], 2), fixed(shares["peak memory"], 2)]
        rows.append(row)
    return markdown_table(rows, left=3)


# -------------------------------------------------------------------------------------------- a GPU


def gpu() -> str:
    """Show what was measured of large models on a GPU: batch, seconds, MFU, peak and estimate."""
    head = ["row", "images a call", "sampling, s", "training, s", "images/s"]
    rows = [[*head, "MFU of both", "peak, GiB", "estimate"]]
    for row in read("performance-queue")["rows"]:
        if row["row"] not in SHOWN:
            continue
        if "failed" in row:
            late = row["failed"].removeprefix("ended after ")  # "85 s", where that is what it says
            ended = late != row["failed"]
            why = f"did not end within {late}" if ended else "fails in the backward pass"
            rows.append([f"`{row['row']}`", "", why, "", "", "", "", ""])
        elif row["row"] != "nccl":
            found = row["result"]
            largest = max((found["memory"][p] for p in GPU), key=lambda memory: memory["measured"])
            cells = [f"`{row['row']}`", str(found["batches"]["rollout"])]
            cells += [fixed(found["seconds"][phase], 2) for phase in GPU]
            cells += [fixed(found["images_per_s"])]
            cells += [", ".join(fixed(found["mfu"][phase], 2) for phase in GPU)]
            cells += [fixed(largest[key] / 2**30) for key in ("measured", "estimate")]
            rows.append(cells)
    return markdown_table(rows)


# ----------------------------------------------------------------------------------- the adapters


def worth() -> str:
    """Say what the adapters take beside their pipelines' own calls."""
    shares = {}
    for name, row in read("adapters")["adapters"].items():
        times = {}
        for side in ("adapter", "own"):
            times[side] = [row[f"{side} {what}"]["ms"] for what in ("sampled", "trained")]
        if None not in times["own"]:  # else the own call makes more pixels
            shares[name] = sum(times["adapter"]) / sum(times["own"])
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return wrapped(
        f"Of the processor time of the own call an adapter takes {fixed(shares[least], 2)} "
        f"(`{least}`) to {fixed(shares[most], 2)} (`{most}`) on tiny pipelines, for four images "
        "that are sampled and trained ([adapters.json](../assets/results/adapters.json), by "
        "`scripts/bench/adapters.py`): it puts into one call what the pipeline asks one by one."
    )


# (first mark, last mark, what stands between them)
PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("findings", "end of findings", findings),
    ("side by side", "side by side: end", side_by_side),
    ("gpu: table", "gpu: end", gpu),
    ("adapters: table", "adapters: end", worth),
)


TIGHT = ("side by side", "gpu: table")
"""Parts without an empty line to their marks."""


def filled(text: str, start: str, end: str, part: Callable[[], str]) -> str:
    """Fill a part of a page that has its marks."""
    if f"<!-- {start} -->" not in text:
        return text
    return between(text, start, end, [part()], "\n" if start in TIGHT else "\n\n")


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List each page of docs/ with each part."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    found: list[tuple[Path, Callable[[str], str]]] = []
    for start, end, part in PARTS:
        found += [(page, partial(filled, start=start, end=end, part=part)) for page in pages]
    return found
