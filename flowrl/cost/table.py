"""The table of what the shipped configs for released models take: the result file, and the same in
Markdown."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from flowrl.config.load import load_config
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import flop, numbers, size
from flowrl.cost.estimate import estimate
from flowrl.cost.memory import PHASES
from flowrl.cost.report import as_json

FOLDERS = ("sd3/", "flux/", "sd15/")
LIBRARIES = ("torch", "diffusers", "transformers", "peft")  # other releases keep other tensors
NOT_MEASURED = "not measured"
BEGIN, END = (
    "<!-- estimates: written by scripts/research/estimates.py -->",
    "<!-- end of estimates -->",
)
_HEAD = ("config", "network", "trained", *PHASES, "work of an iteration", "measured peak")


def collect(names: list[str] | None = None) -> dict[str, Any]:
    """Estimate shipped configs, by default all for released models -> what the result file
    holds."""
    chosen = names or [name for name in list_configs() if name.startswith(FOLDERS)]
    rows = {name: {**as_json(estimate(load_config(name))), "measured": None} for name in chosen}
    return {
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "configs": rows,
    }


def page(text: str, result: dict[str, Any]) -> str:
    """Put the table between the marks of a page."""
    block = f"{BEGIN}\n{markdown(result)}{END}"
    return re.sub(
        f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL
    )


def markdown(result: dict[str, Any]) -> str:
    """Say a result file as a Markdown table; a config's measured peak is in bytes, or None."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    for name, row in result["configs"].items():
        peaks = [size(row["peak"][phase]) for phase in PHASES]
        measured = NOT_MEASURED if row["measured"] is None else size(row["measured"])
        counted = [numbers(row["parameters"][key]) for key in ("network", "trained")]
        cells = [f"`{name}`", *counted, *peaks, flop(sum(row["flops"].values())), measured]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in result["libraries"].items())
    return "\n".join([*lines, "", f"Counted with {versions}."]) + "\n"
