"""The table of what the shipped configs for released models take: the result file, and the same in
Markdown."""

from __future__ import annotations

import importlib.metadata
import re
import textwrap
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.core.tables import flop, parameter_count, size
from flowrl.cost.estimate import estimate
from flowrl.cost.memory import PHASES
from flowrl.cost.report import estimate_as_json

EMBEDDED = ("shapes/",)  # configs of models that ship with flowrl
LIBRARIES = ("torch", "diffusers", "transformers", "peft")  # other releases keep other tensors
NOT_MEASURED = "not measured"
LEFT_OUT = ("rewards", "time_of_1000_iterations")  # of an estimate, in the result file
BEGIN, END = (
    "<!-- estimates: written by scripts/results/estimates.py -->",
    "<!-- end of estimates -->",
)
_HEAD = ("config", "network", "trained", *PHASES, "work of an iteration", "measured peak")


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
        rows[name]["measured"] = None
    return {
        "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "configs": rows,
    }


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Put the configs of a newer result file over those of an older one, sorted by name.

    Rows that were counted with other libraries may join where at least one config is in both files,
    and all that are come out alike; they keep their own `libraries`, and the older rows stay. Raise
    ConfigError where that is not so: their numbers do not compare. A config that is no longer
    shipped is left out.
    """
    # rows of other libraries join only if a row that both have came out alike
    added, had = new["configs"], old["configs"]
    if old["libraries"] != new["libraries"]:
        both = sorted(added.keys() & had.keys())
        other = [
            name for name in both if _without_measured(added[name]) != _without_measured(had[name])
        ]
        if other or not both:
            what = f"{', '.join(other)} differ" if other else "no config is in both"
            raise ConfigError(
                f"estimates: the kept rows were counted with {old['libraries']}, the new ones with "
                f"{new['libraries']}, and {what}; name two configs that are there already, or "
                "estimate all anew"
            )
        # and then they say which libraries theirs are
        own = {"libraries": new["libraries"]}
        added = {name: {**row, **own} for name, row in added.items() if name not in had}
    # in the order of the shipped configs
    rows = had | added
    return {**old, "configs": {name: rows[name] for name in released_configs() if name in rows}}


def _without_measured(row: dict[str, Any]) -> dict[str, Any]:
    """Return what was counted of a config, without what was measured and with which libraries."""
    return {key: value for key, value in row.items() if key not in ("measured", "libraries")}


def put_into_page(text: str, result: dict[str, Any]) -> str:
    """Put the table between the marks of a page."""
    block = f"{BEGIN}\n{_markdown_table(result)}{END}"
    return re.sub(
        f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL
    )


def _markdown_table(result: dict[str, Any]) -> str:
    """Say a result file as a Markdown table; a config's measured peak is in bytes, or None."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    for name, row in result["configs"].items():
        peaks = [size(row["peak"][phase]) for phase in PHASES]
        measured = NOT_MEASURED if row["measured"] is None else size(row["measured"])
        weights = [parameter_count(row["parameters"][key]) for key in ("network", "trained")]
        cells = [f"`{name}`", *weights, *peaks, flop(sum(row["flops"].values())), measured]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *libraries_of(result)]) + "\n"


def libraries_of(result: dict[str, Any]) -> list[str]:
    """Say which libraries the rows were counted with -> lines of at most 100 columns."""
    said = f"Counted with {versions(result['libraries'])}."
    for own, rows in groupby(sorted(others(result)), key=lambda row: row[0]):
        names = ", ".join(f"`{name}`" for _, name in rows)
        said += f" With {own}, which gives the same numbers where both were tried: {names}."
    return textwrap.wrap(said, 100, break_on_hyphens=False)


def others(result: dict[str, Any]) -> list[tuple[str, str]]:
    """List (libraries, config) of the rows that have libraries of their own."""
    rows = result["configs"].items()
    return [(versions(row["libraries"]), name) for name, row in rows if "libraries" in row]


def versions(libraries: dict[str, str]) -> str:
    """Say names and versions in a line."""
    return ", ".join(f"{name} {version}" for name, version in libraries.items())
