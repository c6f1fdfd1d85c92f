"""Work out the table of docs/first-gpu-run.md: what its run takes on cards of three sizes.

    python scripts/results/first_gpu_run.py                            # all; takes minutes
    python scripts/results/first_gpu_run.py --only sd3/flow_grpo_fast  # this; the rest stays

Writes assets/results/first-gpu-run.json; `tables.py` makes the table from it.
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
from flowrl.core.tables import markdown_table
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


def times(one: Row) -> Times:
    """Return the work of a row."""
    work = {key: Work(*done) for key, done in one["work"].items()}
    return Times(ITERATIONS, work, [])


def told(one: Row) -> str:
    """Say what a config takes on the card of a size: its peak, and the time of all iterations."""
    words = [f"{fixed(one['gib'])} GiB"] + [one["quantize"]] * (one["quantize"] != "none")
    words += ["does not fit"] * (not one["fits"])
    return f"{', '.join(words)}; {time_text(times(one).seconds(card_of(SIZES[one['gigabytes']])))}"


def shape(one: Row) -> list[str]:
    """Say how large the images are, and how many of them an iteration has."""
    height, width, frames = one["image"]
    prompts, group, _ = one["batch"]
    pixels = f"{height} x {width}" + (f", {frames} frames" if frames > 1 else "")
    return [pixels, f"{prompts * group}"]


def sizes_table() -> str:
    """Show each config on the card of each size."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    plain = {(one["config"], one["gigabytes"]): one for one in rows}
    sizes = [f"{size} GB, {name}" for size, name in SIZES.items()]
    table = [["config", "image", "images of an iteration", *sizes]]
    for name in CONFIGS:
        cells = [told(plain[name, size]) for size in SIZES]
        table.append([f"`{name}`", *shape(plain[name, min(SIZES)]), *cells])
    return markdown_table(table)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills the table of the page."""
    return [(PAGE, lambda text: between(text, "sizes: table", "sizes: end", [sizes_table()]))]


if __name__ == "__main__":
    main()
