"""Rubrics on disk: JSON with a version, written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.errors import ConfigError
from flowrl.core.files import write_text

FORMAT, VERSION = "flowrl rubric", 1
WHO = "rewards.rubric"


class Rule(NamedTuple):
    """One rule, and what it is worth to keep it."""

    text: str
    weight: float


def save_rubric(path: Path, rules: Sequence[Rule], made: dict[str, Any] | None = None) -> None:
    """Write a rubric. made: how it was learnt, for people. Raises RunError."""
    rows = [rule._asdict() for rule in rules]
    data = {"format": FORMAT, "version": VERSION, "rules": rows, "made": made or {}}
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def load_rubric(path: Path) -> list[Rule]:
    """Read a rubric. Raises ConfigError for a file that is none, or of another version."""
    # can it be read, is it a rubric, and one that this release understands?
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{WHO}: file: expected a rubric, as scripts/assets/learn_rubric.py writes it, at {path}: "
            f"{error}"
        ) from error
    kind = data.get("format") if isinstance(data, dict) else None
    if kind != FORMAT:
        raise ConfigError(f"{WHO}: {path}: expected format {FORMAT!r}, got {kind!r}")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ConfigError(
            f"{WHO}: {path}: expected a rubric of version {VERSION}, got version "
            f"{data.get('version')!r}; learn it again with this release of flowrl"
        )
    # rules, each once: a repeated one would count twice
    rows = data.get("rules")
    rules = [_rule(row, path) for row in rows] if isinstance(rows, list) else []
    if not rules or len({rule.text for rule in rules}) < len(rules):
        raise ConfigError(f"{WHO}: {path}: expected a rule or more, each once, got {rows!r:.200}")
    return rules


def _rule(row: Any, path: Path) -> Rule:
    given = row if isinstance(row, dict) else {}
    text, weight = given.get("text"), given.get("weight", math.nan)
    numeric = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not isinstance(text, str) or not text.strip() or not numeric or not math.isfinite(weight):
        raise ConfigError(f"{WHO}: {path}: expected rules with text and weight, got {row!r:.200}")
    return Rule(text, float(weight))
