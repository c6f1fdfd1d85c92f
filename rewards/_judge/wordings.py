"""Questions in flowrl's own words, and those of a config in their place."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.core.errors import ConfigError


def wordings(own: Mapping[str, str], given: Mapping[str, str] | None, who: str) -> dict[str, str]:
    """Return the wordings by name, a config's where it gives some. Each must have the marks, such
    as {prompt}, that our own has, once each. Raises ConfigError."""
    unknown = sorted(set(given or {}) - set(own))
    if unknown:
        raise ConfigError(
            f"{who}: wordings: expected some of {', '.join(own)}, got {', '.join(unknown)}"
        )
    for name, text in (given or {}).items():
        for mark in marks(own[name]):
            if text.count(mark) != 1:
                raise ConfigError(
                    f"{who}: wordings.{name}: expected {mark} once, got {text.count(mark)} times"
                )
    return {**own, **(given or {})}


def marks(text: str) -> list[str]:
    """Return which places for texts a wording has."""
    return [mark for mark in ("{prompt}", "{criterion}", "{requirement}") if mark in text]


def fill(wording: str, **texts: str) -> str:
    """Put texts at their marks; what looks like a mark inside of a text stays as it is."""
    out, rest = "", wording
    places = {f"{{{name}}}": text for name, text in texts.items()}
    while rest:
        found = [(rest.find(mark), mark) for mark in places if mark in rest]
        if not found:
            break
        at, mark = min(found)
        out += rest[:at] + places[mark]
        rest = rest[at + len(mark) :]
    return out + rest
