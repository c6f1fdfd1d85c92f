"""The table of what the shipped configs for released models take: the result file, and the same in
Markdown."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from typing import Any

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import flop, numbers, size
from flowrl.cost.estimate import estimate
from flowrl.cost.memory import PHASES
from flowrl.cost.report import as_json

EMBEDDED = ("shapes/",)  # configs of models that ship with flowrl
LIBRARIES = ("torch", "diffusers", "transformers", "peft")  # other releases keep other tensors
NOT_MEASURED = "not measured"
BEGIN, END = (
    "<!-- estimates: written by scripts/research/estimates.py -->",
    "<!-- end of estimates -->",
)
_HEAD = ("config", "network", "trained", *PHASES, "work of an iteration", "measured peak")


def configs() -> list[str]:
    """Return the names of the shipped configs for released models, sorted."""
    return [name for name in list_configs() if not name.startswith(EMBEDDED)]


def collect(names: Iterable[str]) -> dict[str, Any]:
    """Estimate shipped configs -> what the result file holds."""
    rows = {name: {**as_json(estimate(load_config(name))), "measured": None} for name in names}
    return {
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "configs": rows,
    }


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Put the configs of a newer result file over those of an older one, sorted by name.

    Raise ConfigError if they were counted with different libraries, whose numbers do not compare.
    A config that is no longer shipped is left out.
    """
    if old["libraries"] != new["libraries"]:
        raise ConfigError(
            f"estimates: the kept rows were counted with {old['libraries']}, the new ones with "
            f"{new['libraries']}; estimate all configs anew"
        )
    rows = old["configs"] | new["configs"]
    return {**new, "configs": {name: rows[name] for name in configs() if name in rows}}


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
