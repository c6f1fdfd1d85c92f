"""Overrides of the command line, ``key.subkey=value``, and where each value came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flowrl.config.values import show
from flowrl.config.yaml_text import parse_yaml
from flowrl.core.errors import ConfigError, unknown


@dataclass(frozen=True)
class Source:
    """Where values came from, for messages."""

    file: str = "config"
    overrides: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the dotted key of each override."""
        return [text.partition("=")[0].strip() for text in self.overrides]

    def at(self, key: str) -> str:
        """Name the override that set `key`, or the file."""
        for text, name in zip(reversed(self.overrides), reversed(self.names), strict=True):
            if key == name or key.startswith((f"{name}.", f"{name}[")):
                return f"override {text!r}: {key}"
        return f"{self.file}: {key}"

    def below(self, key: str) -> str:
        """Name the first override of a key below `key`, or what set `key`."""
        for text, name in zip(self.overrides, self.names, strict=True):
            if name.startswith(f"{key}."):
                return f"override {text!r}: {key}"
        return self.at(key)


def tuple_of_texts(values: Any, what: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raises ConfigError for one text alone, which would be read
    letter by letter, and for anything else."""
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return tuple(values)
    hint = f"; write [{values!r}]" if isinstance(values, str) else ""
    raise ConfigError(f"{what}: expected a list of texts, got {show(values)}{hint}")


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``key.subkey=value`` into (["key", "subkey"], value). Raises ConfigError."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(
            f"override {text!r}: expected key.subkey=value, for example optimizer.lr=1e-4"
        )
    return parts, parse_yaml(value, f"override {text!r}")


def apply_override(raw: dict[str, Any], text: str) -> None:
    """Set one value in the raw config, in place. Raises ConfigError."""
    parts, value = parse_override(text)
    node = raw

    # go down to the mapping that holds the key, and make those on the way that are not there
    for depth, part in enumerate(parts[:-1], 1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            path = ".".join(parts[:depth])
            raise ConfigError(
                f"override {text!r}: {path} is {show(node)} and has no keys of its own"
            )

    # null takes a reward away; elsewhere it is a value
    if value is None and parts[0] == "rewards" and len(parts) == 2:
        if parts[1] not in node:
            raise ConfigError(f"override {text!r}: rewards {unknown(parts[1], node, 'reward')}")
        del node[parts[1]]
    else:
        node[parts[-1]] = value
