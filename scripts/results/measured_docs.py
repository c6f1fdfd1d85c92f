"""Tables of what was measured beside gains: the doctor's findings, speed, memory, published code.

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
SIDE = ("sampling", "decoding", "training", "between", "all")
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


def examined() -> str:
    """Show what the doctor says of runs with a fault, and of shipped configs without one."""
    found = read("doctor")
    seconds = [row["cpu_seconds"] for row in found["shipped"]]
    more = sum(bool(row["also"]) for row in found["results"])
    rows = [
        ["measured", "result"],
        ["faults, named first", f"{found['named']} of {found['faults']}"],
        ["faults with further findings behind the first", str(more)],
        ["configs of `shapes/` on which it is silent", f"{found['silent']} of {found['configs']}"],
        ["processor seconds for a config", f"{fixed(min(seconds), 0)} to {fixed(max(seconds), 0)}"],
    ]
    tables = [markdown_table(rows, left=1)]
    spoken = [["config", "findings"]]
    for row in found["shipped"]:
        if row["findings"]:
            spoken.append([f"`{row['config']}`", ", ".join(row["findings"])])
    if len(spoken) > 1:
        tables.append(markdown_table(spoken, left=2))
    return "\n\n".join(tables)


# ----------------------------------------------------------------- beside others' code and programs


def published() -> str:
    """Show how far published functions and ours lie apart on the same numbers."""
    rows = [["published", "commit", "ours", "quantity", "largest difference", "largest value"]]
    for case in read("published-code")["cases"].values():
        place = f"https://github.com/{case['repository']}/blob/{case['commit']}/{case['path']}"
        theirs = f"[{case['functions'][0]}]({place}) of {case['repository']}"
        for what, found in case["gaps"].items():
            numbers = [f"{found['difference']:.0e}", f"{found['value']:.2g}"]
            rows.append([theirs, case["commit"][:7], case["ours"], what, *numbers])
    return markdown_table(rows, left=4)


def side_by_side() -> str:
    """Show the same work in public trainers and in flowrl."""
    head = ["trainer", *SIDE, "range", "network calls", "rows", "peak MiB", "share"]
    parts = []
    for file in sorted(RESULTS.glob("side-by-side-*.json")):
        result, rows = read(file.stem), [head]
        for name, found in result["trainers"].items():
            share = result["ratios"].get(name)
            row = [name, *(fixed(found["seconds"][phase], 2) for phase in SIDE)]
            row += [f"{fixed(min(found['all']), 2)} to {fixed(max(found['all']), 2)}"]
            row += [str(sum(found["calls"].values())), str(sum(found["rows"].values()))]
            row += [fixed(found["peak_MiB"], 0), fixed(share["all"], 2) if share else "1"]
            rows.append(row)
        parts.append(f"{work_of(result)}\n\n{markdown_table(rows)}")
    return "\n\n".join(parts)


def work_of(result: Result) -> str:
    """Say what the work of both trainers was."""
    work = result["work"]
    parts = [
        counted(work["prompts"], "prompt"),
        f"{work['group']} images each, {work['steps']} steps, {work['size']} pixels",
        f"guidance {work['guidance']:g}",
    ]
    # what only some have
    if work["kl"]:
        parts.append(f"KL {work['kl']:g}")
    parts.append(f"{counted(work['batch'], 'sample')} in a network call, {work['dtype']}")
    changed = " with uncommitted changes" if result["commit"].endswith("-dirty") else ""
    return wrapped(
        f"`{result['trainer']}` at {result['commit'][:8]}{changed} on {work['model']}: "
        f"{', '.join(parts)}; {counted(result['rounds'], 'round')}, "
        f"the {result['clock']}'s seconds."
    )


def counted(number: int, what: str) -> str:
    """Say "1 prompt", "2 prompts"."""
    return f"{number} {what}{'s' * (number > 1)}"


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
    ("measured", "end of measured", examined),
    ("published code: table", "published code: end", published),
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
