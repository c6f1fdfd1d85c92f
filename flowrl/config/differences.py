"""A config as one level of dotted keys, to compare two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = "(none)"


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return nested data by dotted key: ``{"train": {"group": 8}}`` as ``{"train.group": 8}``; a
    list is one value."""
    if not isinstance(value, Mapping):
        return {key: value}
    found: dict[str, Any] = {}
    for name, inside in value.items():
        found |= flat(inside, f"{key}.{name}" if key else str(name))
    return found


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the keys of two flat configs whose values differ, or that one of them lacks."""
    every = dict.fromkeys([*one, *two])
    return [key for key in every if one.get(key, MISSING) != two.get(key, MISSING)]
