"""Estimate the shipped configs for released models, and those that are to fit a card.

    python scripts/results/estimates.py                          # all configs, as they are
    python scripts/results/estimates.py --only flux/flow_grpo    # these; the rest stays as it is
    python scripts/results/estimates.py --profiles               # under the profiles of cards,
                                                                 # of all or of those of --only

Writes assets/results/estimates.json, or profiles.json; `tables.py` makes the tables of
docs/memory.md from them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from figures import between, fixed, wrapped

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import flop, markdown_table, parameter_count, size
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import GIB, PROFILES, fitted
from flowrl.cost.memory import PHASES
from flowrl.cost.report import estimate_as_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "assets" / "results", ROOT / "docs" / "memory.md"
PLAIN, FITTED = RESULTS / "estimates.json", RESULTS / "profiles.json"
EMBEDDED = ("shapes/",)  # configs of models that ship with flowrl
LIBRARIES = ("torch", "diffusers", "transformers", "peft")  # other releases keep other tensors
LEFT_OUT = ("rewards", "time_of_1000_iterations")  # of an estimate, in the result file
FAST = ("sd3", "flux", "flux_kontext", "qwen_image", "z_image", "flux2_klein", "flux2", "wan")
VIDEO = ("wan/flow_grpo_fast_22", "wan/flow_grpo_fast_i2v")
LARGE = ("wan/branch_grpo", "wan/dance_grpo")
EDIT = "qwen_edit_plus/flow_grpo_fast"
CONFIGS = (*(f"{model}/flow_grpo_fast" for model in FAST), *VIDEO, EDIT, *LARGE)
"""Flow-GRPO-Fast on the released models, and the largest methods on Wan."""
SHOWN = (
    "sd15/ddpo",
    "sdxl/spo",
    "sd3/flow_grpo_fast",
    "sd3/flow_grpo",
    "flux/flow_grpo_fast",
    "flux/mix_grpo",
    "qwen_image/flow_grpo_fast",
    "wan/flow_grpo_fast",
)
"""Configs of the table of plain estimates, some of each size; the result file has all."""
Row = dict[str, Any]


def row(name: str, profile: str) -> Row:
    """Estimate a config under a profile; `less`: what the profile trains less, if anything."""
    plain = load_config(name)
    found = fitted(plain, profile)
    config, largest = load_config(name, found.overrides), found.phase
    assert largest is not None  # all are released models
    runtime, lora = (config.model.kwargs[key] or {} for key in ("runtime", "lora"))
    before = plain.model.kwargs["lora"] or {}
    less = [f"rank {lora['rank']}"] if lora.get("rank") != before.get("rank") else []
    less += ["8-bit AdamW"] * (config.optimizer.fn != plain.optimizer.fn)
    return {
        "config": name,
        "profile": profile,
        "gib": largest.bytes / GIB,
        "phase": largest.name,
        "fits": found.fits,
        "as_it_is": not found.overrides,
        "quantize": runtime.get("quantize", "none"),
        "text_encoders": runtime.get("text_encoders", "device"),
        **({"less": less} if less else {}),
    }


def profiled(names: Sequence[str]) -> None:
    """Estimate configs under every profile; the file's other rows stay."""
    machine = environment()
    kept = json.loads(FITTED.read_text(encoding="utf-8"))["rows"]
    rows = {(one["config"], one["profile"]): one for one in kept}
    about = {"command": "python scripts/results/estimates.py --profiles"}
    for name in names:
        rows |= {(name, profile): row(name, profile) for profile in PROFILES}
        # after each config, since all of them take minutes
        there = [rows[name, profile] for name in CONFIGS for profile in PROFILES]
        write_json(FITTED, {**about, "rows": there, "environment": machine})


def main() -> None:
    """Estimate all configs, those that are named, or the profiles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="CONFIG", help="such as flux/flow_grpo")
    parser.add_argument("--profiles", action="store_true")
    args = parser.parse_args()
    if args.profiles:
        profiled(args.only or CONFIGS)
        return
    result = estimate_configs(args.only or released_configs())
    if args.only:
        result = merged(json.loads(PLAIN.read_text(encoding="utf-8")), result)
    write_json(PLAIN, result)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """Return what fills both tables of docs/memory.md."""
    results = json.loads(PLAIN.read_text(encoding="utf-8"))
    results["configs"] = {name: results["configs"][name] for name in SHOWN}
    return [(PAGE, lambda text: put_into_page(text, results)), (PAGE, profiles)]


def profiles(text: str) -> str:
    """Put a row for each config between the marks."""
    rows = json.loads(FITTED.read_text(encoding="utf-8"))["rows"]
    plain = {(one["config"], one["profile"]): one for one in rows}
    table = [["config", *(f"`{profile}`" for profile in PROFILES)]]
    for name in CONFIGS:
        table.append([f"`{name}`", *(told(plain[name, profile]) for profile in PROFILES)])
    return between(text, "profiles: table", "profiles: end", [markdown_table(table)])


def told(one: Row) -> str:
    """Say a peak, and what the profile did for it."""
    words = [fixed(one["gib"])]
    words += [one["quantize"]] * (one["quantize"] != "none") + one.get("less", [])
    words += ["as it is"] * one.get("as_it_is", False)
    return ", ".join(words) + ("" if one["fits"] else ": does not fit")


# ------------------------------------------------------------------- the table of plain estimates


def released_configs() -> list[str]:
    """Return the names of the shipped configs for released models, sorted."""
    return [name for name in list_configs() if not name.startswith(EMBEDDED)]


def estimate_configs(names: Iterable[str]) -> dict[str, Any]:
    """Estimate shipped configs -> what the result file holds: no times, and peaks without
    rewards."""
    rows = {}
    for name in names:
        found = estimate_as_json(estimate(load_config(name)))
        rows[name] = {key: value for key, value in found.items() if key not in LEFT_OUT}
    return {
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "configs": rows,
    }


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Put the configs of a newer result file over those of an older one, sorted by name; one that
    is no longer shipped is left out. Raise ConfigError where other libraries counted them: their
    numbers do not compare."""
    if old["libraries"] != new["libraries"]:
        raise ConfigError(
            f"estimates: the kept rows were counted with {old['libraries']}, the new ones with "
            f"{new['libraries']}; estimate all anew"
        )
    rows = old["configs"] | new["configs"]
    return {**old, "configs": {name: rows[name] for name in released_configs() if name in rows}}


def put_into_page(text: str, result: dict[str, Any]) -> str:
    """Put the table between the marks of a page."""
    table = [["config", "network", "trained", *PHASES, "work of an iteration"]]
    for name, row in result["configs"].items():
        peaks = [size(row["peak"][phase]) for phase in PHASES]
        weights = [parameter_count(row["parameters"][key]) for key in ("network", "trained")]
        table.append([f"`{name}`", *weights, *peaks, flop(sum(row["flops"].values()))])
    versions = [f"{name} {version}" for name, version in result["libraries"].items()]
    said = wrapped(f"Counted with {', '.join(versions)}.")
    return between(text, "estimates: table", "estimates: end", [markdown_table(table), said])


if __name__ == "__main__":
    main()
