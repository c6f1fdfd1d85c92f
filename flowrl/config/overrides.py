"""Raw configs: YAML that is read strictly, overrides ``key.subkey=value`` of the command line, and
where each value came from.

What is ambiguous or dangerous in YAML is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from flowrl.config.values import plain, show
from flowrl.core.errors import ConfigError, unknown
from flowrl.core.files import LARGEST, shortened

LONGEST = 2**20  # characters of a config


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document into plain data.

    Raises ConfigError for tags, anchors, duplicate or non-text keys, and for what is longer than
    any config, which would take minutes.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{where}: expected at most {LONGEST} characters, got {len(text)}")
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not a config: nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys and without aliases.

    Of duplicate keys the last one would win; aliases can grow without bounds.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not allowed; write it out"
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        """Refuse 010, which YAML 1.1 reads as 8, 1:30, which it reads as 90, and what no float64
        holds."""
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
            problem = f"ambiguous number {node.value!r}; write it without a leading 0 or a colon"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        found = int(super().construct_yaml_int(node))  # type: ignore[no-untyped-call]
        if abs(found) > LARGEST:  # in base 16 of any length, and Python does not print it
            problem = f"{shortened(node.value)} is no finite number of 64 bits"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return found

    def construct_yaml_float(self, node: Any) -> float:
        """Refuse 1:30.5, which YAML 1.1 reads as 90.5."""
        if ":" in node.value:
            problem = f"ambiguous number {node.value!r}; write it without a colon"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return float(super().construct_yaml_float(node))  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that comes twice or is no text."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = ""
            if not isinstance(key, str):
                problem = f"expected a text as key, got {key!r}"
            elif key in seen:
                problem = f"duplicate key {key!r}"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(
        f"tag:yaml.org,2002:{_kind}", getattr(_StrictLoader, f"construct_yaml_{_kind}")
    )


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


def dotted(above: str, name: object) -> str:
    """Return the key of what is called `name` below the key `above`, "" at the top."""
    if not above:
        return str(name)
    return f"{above}.{name}"


def tuple_of_texts(values: Any, what: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raises ConfigError for one text alone, which would be read
    letter by letter, and for anything else."""
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return tuple(values)
    got = show(values)
    if isinstance(values, str):
        got += f"; write [{values!r}]"
    raise ConfigError(f"{what}: expected a list of texts, got {got}")


def override_texts(values: Mapping[str, Any], key: str = "") -> list[str]:
    """Return nested values as overrides: ``{"train": {"iterations": 20}}`` as
    ``["train.iterations=20"]``.

    A mapping with an `fn` is a whole call and stays one value. Raises ConfigError for what YAML
    cannot hold.
    """
    texts = []
    for name, value in values.items():
        whole = dotted(key, name)
        if isinstance(value, Mapping) and value and "fn" not in value:
            texts += override_texts(value, whole)
        else:
            texts.append(f"{whole}={_in_yaml(value, whole)}")
    return texts


def _in_yaml(value: Any, key: str) -> str:
    """Write a value as the right side of an override."""
    try:
        known = plain(value)
    except TypeError:
        raise ConfigError(
            f"{key}: expected a value that a config can hold (numbers, texts, true or false, null, "
            f"lists, mappings), got {show(value)}"
        ) from None
    text = yaml.safe_dump(known, default_flow_style=True, width=10**9, allow_unicode=True)
    return str(text).strip().removesuffix("...").strip()


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``key.subkey=value`` into (["key", "subkey"], value). Raises ConfigError."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(
            f"override {text!r}: expected key.subkey=value, for example optimizer.lr=1e-4"
        )
    return parts, parse_yaml(value, f"override {text!r}")


def text_override(key: str, text: str) -> str:
    """Return the override that gives a key a text as it is: in quotes where YAML reads another
    value out of it, as of "[a].csv" or "a: b.txt"."""
    plain = f"{key}={text}"
    try:
        kept = parse_override(plain)[1] == text
    except ConfigError:
        kept = False
    return plain if kept else f"{key}={json.dumps(text)}"


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


def plugin_words(names: Iterable[str]) -> list[str]:
    """Return the words of a command that allow plugins."""
    words = []
    for name in names:
        words += ["--plugin", name]
    return words
