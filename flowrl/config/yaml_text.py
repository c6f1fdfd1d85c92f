"""Read YAML strictly: what is ambiguous or dangerous in it is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

from flowrl.core.errors import ConfigError


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document into plain data.

    Raises ConfigError for tags, anchors, duplicate or non-text keys.
    """
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
        """Refuse 010, which YAML 1.1 reads as 8, and 1:30, which it reads as 90."""
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
            problem = f"ambiguous number {node.value!r}; write it without a leading 0 or a colon"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(super().construct_yaml_int(node))  # type: ignore[no-untyped-call]

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
            problem = f"duplicate key {key!r}" if isinstance(key, str) and key in seen else ""
            if not isinstance(key, str):
                problem = f"expected a text as key, got {key!r}"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(
        f"tag:yaml.org,2002:{_kind}", getattr(_StrictLoader, f"construct_yaml_{_kind}")
    )
