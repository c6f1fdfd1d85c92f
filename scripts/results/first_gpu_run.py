"""Work out the tables of docs/first-gpu-run.md: what its run takes on cards of three sizes.

    python scripts/results/first_gpu_run.py                            # all; takes minutes
    python scripts/results/first_gpu_run.py --only sd3/flow_grpo_fast  # this; the rest stays

Writes assets/results/first-gpu-run.json; `tables.py` makes the tables from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from estimates import LIBRARIES
from figures import between, fixed

from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.tables import flop, markdown_table
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import GIB, fitted
from flowrl.cost.time_shares import CARDS, ITERATIONS, Card, Times, Work, time_text, times_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "first-gpu-run.json"
PAGE = ROOT / "docs" / "first-gpu-run.md"
CONFIGS = {  # name -> how the reward is called for it
    "sd3/flow_grpo_fast": "{fn: pickscore}",
    "z_image/flow_grpo_fast": "{fn: pickscore}",
    "flux2_klein/flow_grpo_fast": "{fn: pickscore}",
    "flux/flow_grpo_fast": "{fn: pickscore}",
    "qwen_image/flow_grpo_fast": "{fn: pickscore}",
    "wan/flow_grpo_fast": "{fn: pickscore, frames: mean}",
}
SIZES = {24: "RTX 4090", 48: "L40S", 80: "A100"}  # GB -> the card whose times are shown
LISTS = {"train": 500, "test": 100}  # prompts
CHANGES = ("train.prompts=16",)  # those of the page's own config
WALKED = "sd3/flow_grpo_fast"
ITERATION = ("sampling", "decode", "rewards", "training")
Row = dict[str, Any]


def card_of(name: str) -> Card:
    """Return a card by its name."""
    return next(card for card in CARDS if card.name == name)


def overrides(name: str, folder: Path) -> list[str]:
    """Return what the page changes of a config, with its lists of prompts in a folder."""
    changes = [*CHANGES, f"rewards={{pickscore: {CONFIGS[name]}}}", "eval.score=''"]
    for key, count in LISTS.items():
        file = folder / f"{key}.txt"
        file.write_text("".join(f"prompt {n} of {key}\n" for n in range(count)))
        changes.append(f"prompts.{key}={file}")
    return changes


def row(name: str, gigabytes: int, folder: Path) -> Row:
    """Estimate a config on the card of a size."""
    given = overrides(name, folder)
    profile = fitted(load_config(name, given), f"{gigabytes}gb", given)
    config = load_config(name, [*given, *profile.overrides])
    found, times = estimate(config), times_of(estimate(config))
    assert profile.phase is not None and times is not None  # all are released models
    runtime = config.model.kwargs["runtime"] or {}
    return {
        "config": name,
        "gigabytes": gigabytes,
        "image": [config.image.height, config.image.width, config.model.kwargs.get("frames", 1)],
        "batch": [config.train.prompts, config.train.group, config.train.micro_batch],
        "changes": profile.overrides,
        "quantize": runtime.get("quantize", "none"),
        "gib": profile.phase.bytes / GIB,
        "phase": profile.phase.name,
        "fits": profile.fits,
        "images": found.forecast.work.images,
        "work": {key: list(one) for key, one in times.work.items()},
    }


def main() -> None:
    """Estimate all configs, or those that are named, on every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="the rest stays as it is")
    chosen = parser.parse_args().only or [*CONFIGS]
    kept = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else []
    rows = {(one["config"], one["gigabytes"]): one for one in kept}
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    about = {"command": "python scripts/results/first_gpu_run.py", "lists": LISTS}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            rows |= {(name, size): row(name, size, Path(folder)) for size in SIZES}
        # after each config, since all of them take minutes
        there = [rows[name, size] for name in CONFIGS for size in SIZES if (name, size) in rows]
        write_json(FILE, {**about, "libraries": libraries, "rows": there})


def times(one: Row, names: tuple[str, ...] = ()) -> Times:
    """Return the work of a row, or of some of its parts."""
    work = {key: Work(*done) for key, done in one["work"].items() if not names or key in names}
    return Times(ITERATIONS, work, [])


def told(one: Row) -> list[str]:
    """Return the cells of a row."""
    card = card_of(SIZES[one["gigabytes"]])
    height, width, frames = one["image"]
    prompts, group, states = one["batch"]
    pixels = f"{height} x {width}" + (f", {frames} frames" if frames > 1 else "")
    notes = [fixed(one["gib"])] + [one["quantize"]] * (one["quantize"] != "none")
    notes += ["as it is"] * (not one["changes"]) + ["does not fit"] * (not one["fits"])
    fast, slow = times(one, ITERATION).seconds(card)
    an_iteration = time_text((fast / ITERATIONS, slow / ITERATIONS))
    whole = time_text(times(one).seconds(card))
    cells = [f"`{one['config']}`", pixels, f"{prompts} x {group}, {states}"]
    return [*cells, ", ".join(notes), an_iteration, whole]


def sizes_table() -> str:
    """Show each config on the card of each size."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    parts = []
    for size, name in SIZES.items():
        head = ["config", "image", "prompts x images, states", "GiB", "an iteration"]
        table = [[*head, f"{ITERATIONS:,} iterations"]]
        table += [told(one) for one in rows if one["gigabytes"] == size]
        parts.append(f"**{size} GB**, times on an {name}:\n\n{markdown_table(table)}")
    return "\n\n".join(parts)


def shares_table() -> str:
    """Show where the time of the page's run goes, on the smallest card."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    (one,) = (row for row in rows if row["config"] == WALKED and row["gigabytes"] == 24)
    found, card = times(one), card_of(SIZES[24])
    table = [["part", "share", "work", f"{ITERATIONS:,} iterations"]]
    for name in sorted(found.work, key=lambda name: -found.share(name, card)):
        operations = int(found.work[name].operations)
        done = flop(operations) if operations else "-"
        share = f"{fixed(100 * found.share(name, card))} %"
        table.append([name, share, done, time_text(found.seconds(card, name))])
    whole = time_text(found.seconds(card))
    table.append(["all", "100 %", flop(int(found.total.operations)), whole])
    return markdown_table(table)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills both tables of the page."""
    return [
        (PAGE, lambda text: between(text, "sizes: table", "sizes: end", [sizes_table()])),
        (PAGE, lambda text: between(text, "shares: table", "shares: end", [shares_table()])),
    ]


if __name__ == "__main__":
    main()
