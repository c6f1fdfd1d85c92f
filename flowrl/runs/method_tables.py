"""Descriptions of methods as a person reads them: a short table of many, all that is known of
some."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from flowrl.core.tables import text_table
from flowrl.runs.catalogue import LEVELS, MEANING, Verified, status_words

# of a config's axes; the others hardly differ
SHOWN = ("plan", "transition", "credit", "segment", "select", "loss", "kl")
COST = (
    "calls per image: network calls of an iteration, sampling and 3 (with a KL 4) per trained "
    "state, over the images that are scored; guidance doubles them, which is counted only of "
    "train.guidance and train.reference_guidance"
)
MORE = (
    "verified: of the config that was tried most; `flowrl methods NAME` has each config with its "
    "axes, `flowrl methods --configs` those of all methods"
)
_PAGE = 100  # columns of notes where there is no terminal


def methods_table(rows: Sequence[dict[str, Any]], *, width: int | None = None) -> str:
    """Write descriptions as a table of `width` columns: a short row per method, then what the
    columns mean."""
    costly = _is_costly(rows)
    cells = [["name", "method", "paper", "status", "verified", *["calls per image"] * costly]]
    for row in rows:
        paper = row["paper"]["arxiv"] if row["paper"] else "combination"
        calls = [_calls(row["configs"])] if costly else []
        cells.append(
            [row["slug"], row["name"], paper, row["status"], _most(row["configs"]), *calls]
        )
    words = [*MEANING.items(), *LEVELS.items()]
    notes = [*(f"{word}: {meaning}" for word, meaning in words), MORE, *[COST] * costly]
    return f"{text_table(cells, left=len(cells[0]), width=width)}\n\n{_noted(notes, width)}"


def methods_in_full(rows: Sequence[dict[str, Any]], *, width: int | None = None) -> str:
    """Write all that is known of each method: its summary, paper and status, and a table of its
    configs with the functions that they name."""
    costly = _is_costly(rows)
    parts = []
    for row in rows:
        cells = [["config", "verified", "axes", *["calls per image"] * costly]]
        for config in row["configs"]:
            calls = [_calls([config])] if costly else []
            cells.append([config["config"], _most([config]), _axes(config), *calls])
        head = [f"{row['slug']}: {row['name']}", row["summary"]]
        if row["paper"]:
            paper = row["paper"]
            head.append(f"paper: {paper['title']}, arXiv {paper['arxiv']}, {paper['year']}")
        head.append(f"status: {status_words(row['status'], row['parts'])} ({row['meaning']})")
        table = text_table(cells, left=len(cells[0]), width=width)
        parts.append(f"{_noted(head, width)}\n\n{table}")
    return "\n\n\n".join([*parts, *[_noted([COST], width)] * costly])


def _is_costly(rows: Iterable[dict[str, Any]]) -> bool:
    return any("calls" in config for row in rows for config in row["configs"])


def _noted(lines: Iterable[str], width: int | None) -> str:
    return "\n".join(textwrap.fill(line, width or _PAGE) for line in lines)


def _most(configs: Iterable[dict[str, Any]]) -> str:
    """Say how far the config was tried that was tried most."""
    levels = [*LEVELS]
    found = [Verified(**config["verified"]) for config in configs]
    best = max(found, key=lambda one: (-levels.index(one.level), one.seeds), default=Verified())
    return best.words


def _calls(configs: Iterable[dict[str, Any]]) -> str:
    """Write the network calls per image of configs, the least and the most."""
    found = [config["calls_per_image"] for config in configs]
    ends = dict.fromkeys(f"{value:.1f}" for value in (min(found), max(found))) if found else []
    return " to ".join(ends)


def _axes(config: dict[str, Any]) -> str:
    return ", ".join(name for axis in SHOWN for name in config["axes"].get(axis, []))
